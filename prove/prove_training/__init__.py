"""Proves that a training script trains the same on one, two and three processes, or names what is wrong in it.

    python prove train.py [flags of the script]
    python prove --resume_flags "--resume last.pt" train.py --lr 0.1

Any script that trains with Accelerate or with torch.distributed, unchanged. Begin with `proof`, which says what is run
and in which order; `runs` starts the processes, in a `sandbox`. In each of them, `recording` makes the script do the
same work on any number of processes, and records what it does. `stages` finds what is wrong in the records: `single` in
those of one process, `several` in those of several, and `mistakes` says what to do about it.

Imports nothing but torch and NumPy, and Accelerate where it is installed, with datasets for a script that uses it.
"""

import json
import os
import subprocess
import sys

__version__ = "4.0"


def prove(*words: str) -> dict:
    """Judge a script from a test: `assert prove("train.py", "--epochs", "1")["code"] == 0`. Needs no setup or clean-up.

    Args:
        words: of the command line, as `prove-training` takes them.

    Returns:
        The report: code, verdict, findings, notes and lines.
    """
    command = [sys.executable, os.path.dirname(__file__), "--json", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise ValueError(f"prove-training {' '.join(words)} does not start; stderr says why")
    return json.loads(done.stdout)
