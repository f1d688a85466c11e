"""What every script here shares: launching, data, metrics, checkpoints and tracking."""

import gc
import os
import sys

# What libraries make when they are imported stays. To search it for garbage while it grows costs a second of the start;
# `make_accelerator` lets the search begin, among what comes after it.
gc.disable()

CLEAR_LINE = "\r\033[K"
COLOURS = {"red": 31, "green": 32, "yellow": 33}


def show(text: str, colour: str = "", file=None) -> None:
    """Print a line; on a terminal its first word in a colour (not with NO_COLOR set), and not into a progress bar."""
    file = file or sys.stdout
    if sys.stderr.isatty():
        sys.stderr.write(CLEAR_LINE)  # a bar stands there, without a line's end
        sys.stderr.flush()
    if colour and file.isatty() and not os.environ.get("NO_COLOR"):
        first, space, others = text.partition(" ")
        text = f"\033[1;{COLOURS[colour]}m{first}\033[0m{space}{others}"
    print(text, file=file, flush=True)


def stop(sentence: str, code: int = 2, alone: bool = False) -> None:
    """End this process with one sentence on stderr. It is printed once a machine, not once a process.

    alone: this process stops and others may not (of its own data, say), so that the sentence is its to print.
    """
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        show(f"error: {sentence}", "red", sys.stderr)
    raise SystemExit(code)


def explain_interrupt(kind, error, trace):
    """Ctrl-C is not an error to be traced."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        show("stopped by Ctrl-C: nothing was saved", "yellow", sys.stderr)


sys.excepthook = explain_interrupt
