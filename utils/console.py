"""Print lines and error messages; end the process with one."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

COLOURS = {"error:": 31, "done:": 32, "warning:": 33}  # of the first word, on a terminal


def is_local_main() -> bool:
    """Whether this process prints: local rank 0, or not started by a launcher."""
    is_launched = "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    return not is_launched or os.environ.get("LOCAL_RANK", "0") == "0"


def printable(text: str) -> str:
    r"""`text` with control characters escaped, such as \x1b, which file names may contain."""
    return "".join(c if c.isprintable() or c in "\t\n" else ascii(c)[1:-1] for c in text)


def show(text: str, file=None) -> None:
    """Print a line, to stdout by default. On a terminal, colour the first word if it is one of COLOURS.

    If the reader has gone (Ctrl-C ends the `tee` of `script | tee log` at once) or the disk of a log file is full, all
    further output is dropped, and the run goes on to its next checkpoint.
    """
    file = file or sys.stdout
    text = printable(text)
    first, space, rest = text.partition(" ")
    if first in COLOURS and file.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[1;{COLOURS[first]}m{first}\033[0m{space}{rest}"
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        # /dev/null also takes what is still buffered, and what the script and libraries print.
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), file.fileno())
        if file is sys.stdout:
            show(f"warning: the run goes on without output: {error.strerror}", sys.stderr)


def report_to_launcher(sentence: str) -> None:
    """Make the launcher's failure report end with `sentence` instead of "To enable traceback see ..."."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # stderr has the sentence too
            Path(path).write_text(json.dumps({"message": {"message": sentence, "extraInfo": details}}))


def show_error(sentence: str, alone: bool = True) -> None:
    """Print an error message, on any rank or else once per machine, and report it to the launcher."""
    report_to_launcher(f"error: {sentence}")
    if alone or is_local_main():
        show(f"error: {sentence}", sys.stderr)


class Stop(SystemExit):
    """Ends the process, whose error message has been printed; its text is the message."""

    code = 2


def stop(sentence: str, alone: bool = False) -> None:
    """Print an error message, once per machine, and exit.

    For whatever a user can mend: bad flags, data, files, or processes that do not fit. Docstrings do not repeat it.

    Args:
        sentence: what is wrong, the value, what to do.
        alone: this process may be the only one that stops, so it prints on any rank.
    """
    show_error(sentence, alone)
    raise Stop(sentence)


def plural(count: int, word: str) -> str:
    """`count` and `word` in the singular or the plural: "1 process", "2 processes"."""
    ending = "" if count == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{count} {word}{ending}"


def join(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
