"""Output that outlives its reader: a closed pipe or terminal, or a full disk, ends the output and not the run.

Without it `script | tee log` would die of its next line after a Ctrl-C, which ends `tee` at once, and before the
checkpoint is saved.
"""

import os
import sys

from ..console import show


class LastingOutput:
    """A stream that drops what nobody can receive any more."""

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
    """From now on, stdout and stderr outlive their readers; a second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
        elif not isinstance(stream, LastingOutput):
            setattr(sys, name, LastingOutput(stream))
