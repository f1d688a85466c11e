"""`python prove train.py`: prove_training from a checkout, without an install."""

import sys

from prove_training.command import main

del sys.path[0]  # this folder, whose `tests` must not shadow the script's

if __name__ == "__main__":
    sys.exit(main())
