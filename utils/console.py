"""Print a line, and end the process with one sentence."""

import json
import os
import re
import sys
import time
import traceback

CLEAR_LINE = "\r\033[K"
# All but the tab and the line end: a terminal would obey them. The last range is what file names
# have in the place of bytes that are no UTF-8.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
COLOURS = {"red": 31, "green": 32, "yellow": 33}


class LastingOutput:
    """A stream that outlives its reader: what nobody can receive any more is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        # What is still in the buffer goes to /dev/null too, and what libraries write themselves.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        if self is sys.stdout:
            reason = error.strerror or error
            show(f"warning: the run goes on, but not its output: {reason}", "yellow", sys.stderr)


def outlive_readers() -> None:
    """From now on a closed pipe or terminal, or a full disk, ends the output and not the run.

    Without it `script | tee log` would die of its next line after a Ctrl-C, which ends `tee` at
    once, and before the checkpoint is saved.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
        elif not isinstance(stream, LastingOutput):
            setattr(sys, name, LastingOutput(stream))


def is_local_main() -> bool:
    """Whether this process prints: local rank 0, or a process that no launcher started.

    A launcher sets LOCAL_RANK, WORLD_SIZE and MASTER_ADDR. If one is missing, the others were left
    in the environment by something else.
    """
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return local_rank == "0" or not claims_others() or "MASTER_ADDR" not in os.environ


def claims_others() -> bool:
    """Whether the environment speaks of several processes."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def printable(text: str) -> str:
    r"""`text` with control characters as their escapes, \x1b for instance: names of files and
    messages of others may have any."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def show(text: str, colour: str = "", file=None) -> None:
    """Print a line. On a terminal, clear a progress bar first, and colour the first word.

    Args:
        text: the line.
        colour: a key of COLOURS; "" for none. Not used if NO_COLOR is set or `file` is no terminal.
        file: default: stdout.
    """
    file = file or sys.stdout
    text = printable(text)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(CLEAR_LINE)  # a progress bar stands there and has no line end
        sys.stderr.flush()
    if colour and file.isatty() and not os.environ.get("NO_COLOR"):
        first, space, others = text.partition(" ")
        text = f"\033[1;{COLOURS[colour]}m{first}\033[0m{space}{others}"
    print(text, file=file, flush=True)


def report_to_launcher(sentence: str) -> None:
    """Have the launcher's report of the failure end with `sentence`.

    The launcher (torchrun, accelerate launch) names a file for this in TORCHELASTIC_ERROR_FILE.
    Without such a file its report says "To enable traceback see ...".
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    report = {"message": {"message": sentence, "extraInfo": details}}
    try:
        with open(path, "w") as file:
            json.dump(report, file)
    except OSError:
        pass  # the report is a courtesy: the sentence is on stderr too


def stop(sentence: str, code: int = 2, alone: bool = False) -> None:
    """End this process with one sentence on stderr.

    The sentence is printed once a machine, by local rank 0, and handed to the launcher by every
    process.

    Args:
        sentence: what is wrong, the value, what to do.
        code: the exit code.
        alone: this process may be the only one that stops (its data are bad, say). It then prints
            whatever its rank is.

    Raises:
        SystemExit: always.
    """
    report_to_launcher(f"error: {sentence}")
    if alone or is_local_main():
        show(f"error: {sentence}", "red", sys.stderr)
    raise SystemExit(code)


def own_line(trace) -> str:
    """The innermost line in a traceback that is in no library, as " at FILE:LINE"; "" without."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" at {os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else ""


def plural(count: int, word: str) -> str:
    """`count` and `word` in the singular or the plural: "1 process", "2 processes"."""
    if count == 1:
        return f"{count} {word}"
    ending = "es" if word.endswith(("s", "ch")) else "s"
    return f"{count} {word}{ending}"
