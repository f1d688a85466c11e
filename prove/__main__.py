"""`python prove train.py`: prove_training from a checkout, without an install."""

import os
import sys

sys.path[0] = os.path.dirname(os.path.abspath(__file__))  # without dots: lines of prove are known by this name

from prove_training.command import main  # noqa: E402

del sys.path[0]  # the `tests` of this folder must not shadow the script's

if __name__ == "__main__":
    sys.exit(main())
