"""What every script here shares: launching, data, metrics, checkpoints and tracking."""

import os
import sys


def stop(sentence: str, code: int = 2, alone: bool = False) -> None:
    """End this process with one sentence on stderr. It is printed once a machine, not once a process.

    alone: this process stops and others may not (of its own data, say), so that the sentence is its to print.
    """
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)
