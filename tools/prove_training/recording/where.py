"""Where in the script something happens, and how functions of libraries are wrapped."""

import functools
import itertools
import os
import sys
from collections.abc import Iterator

PACKAGE = __name__.partition(".")[0]
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Where:
    """Finds lines of the script.

    Args:
        root: the folder of the script.
    """

    def __init__(self, root: str):
        self.root = root

    def is_own(self, file: str) -> bool:
        """Whether it is a file of the script's folder: neither installed there, nor of this package."""
        is_inside = file.startswith(os.path.join(self.root, "")) and not file.startswith(OWN_FOLDER)
        return is_inside and "site-packages" not in file

    def line(self) -> str:
        """The innermost line of the script's own files, as "train.py:64"."""
        return next(self._frames(), ("", 0))[0]

    def last_of(self, frames) -> str:
        """The same of a traceback."""
        own = [frame for frame in frames if self.is_own(frame.filename)]
        return f"{os.path.relpath(own[-1].filename, self.root)}:{own[-1].lineno}" if own else ""

    def place(self) -> str:
        """Tells apart two calls in one line, two calls of a function that makes a loader, and those of a library."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", PACKAGE):
            frame = frame.f_back
        names = [f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"]
        names += [f"{line}:{column}" for line, column in itertools.islice(self._frames(), 3)]
        return " < ".join(names)

    def _frames(self) -> Iterator[tuple[str, int]]:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if self.is_own(code.co_filename):
                column = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))[2]
                yield f"{os.path.relpath(code.co_filename, self.root)}:{frame.f_lineno}", column
            frame = frame.f_back


def wrap(owner, name: str):
    """A decorator: `function(original, *args, **kwargs)` in place of `owner.name`."""
    original = getattr(owner, name)

    def decorate(function):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return function

    return decorate
