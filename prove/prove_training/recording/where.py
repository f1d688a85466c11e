"""Line numbers of the script, and wrapping of library functions."""

import functools
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType

PACKAGE = __name__.partition(".")[0]
FRAMEWORKS = {" transformers.trainer": "Trainer", " lightning.": "Lightning", " pytorch_lightning.": "Lightning"}
PASSED_ON = re.compile(r"\boriginal\(|\bfunction\(\*args")  # a line of a wrapper that calls what it wraps
replacements = {}  # of functions in modules, by their ids
wrapped = []  # each function, and what is called in its place
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Of this program: the package, and the file beside it that starts it from a checkout.
OWN = (OWN_FOLDER, os.path.join(os.path.dirname(OWN_FOLDER[:-1]), "__main__.py"))


class Where:
    """Finds lines of the script.

    Args:
        root: the folder of the script.
    """

    def __init__(self, root: str):
        self.root, self.inside = root, os.path.join(root, "")
        self.begin = None  # the function that begins this process: who calls it is another process
        self.library = OWN  # a folder in the script's whose lines no user writes: utils/ of a copy

    def is_own(self, file: str) -> bool:
        """Whether a file is in the script's folder, and neither installed there nor part of this package."""
        is_inside = file.startswith(self.inside) and not file.startswith(OWN)
        return is_inside and "site-packages" not in file.removeprefix(self.root)

    def is_shown(self, file: str) -> bool:
        """Whether a line of this file tells a user where a mistake is."""
        return self.is_own(file) and not file.startswith(self.library)

    def has(self, *words: str) -> bool:
        """Whether one of these words is in a file of the script that has been imported."""
        files = {sys.argv[0], *(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))}
        text = "".join(line for file in filter(self.is_own, files) for line in linecache.getlines(file))
        return any(word in text for word in words)

    def line(self) -> str:
        """The innermost line of the script's own files, as "train.py:64"."""
        return next(self._frames(), "").partition(" ")[0]

    def source(self) -> str:
        """The text of that line."""
        file, _, number = self.line().rpartition(":")
        return linecache.getline(os.path.join(self.root, file), int(number or 0))

    def last_of(self, frames) -> str:
        """The same for a traceback."""
        own = [frame for frame in frames if self.is_shown(frame.filename)]
        return f"{os.path.relpath(own[-1].filename, self.root)}:{own[-1].lineno}" if own else ""

    def doing(self, frames) -> str:
        """What a traceback's last line of the script has called, as "in the backward pass at train.py:27"."""
        frames, name = list(frames), ""
        while frames and not self.is_shown(frames[-1].filename):
            last = frames.pop()
            if not last.filename.startswith(OWN) and not last.name.startswith("_") and last.name != "wrapper":
                name = last.name
        name = f"the {name} pass" if name in ("forward", "backward") else name
        return f"in {name} " * bool(name) + f"at {self.last_of(frames) or '?'}"

    def place(self) -> str:
        """A name for this call. Two calls in one line, or through two functions of a library, have different names."""
        frame, names = sys._getframe(1), []
        while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", PACKAGE):
            frame = frame.f_back
        while frame is not None and not self.is_shown(frame.f_code.co_filename):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return " < ".join(names + list(itertools.islice(self._frames(), 3)))

    def framework(self) -> str:
        """The Trainer that has called this, if any: one of mistakes.FRAMEWORKS."""
        frame, names = sys._getframe(1), ""
        while frame is not None:
            names, frame = f"{names} {frame.f_globals.get('__name__', '')}", frame.f_back
        return next((word for name, word in FRAMEWORKS.items() if name in names), "")

    def _frames(self) -> Iterator[str]:
        """Lines of the script's files, the innermost first, each with its offset in the bytecode: "train.py:64 218"."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.begin:
            file = frame.f_code.co_filename
            if self.is_shown(file):
                yield f"{os.path.relpath(file, self.root)}:{frame.f_lineno} {frame.f_lasti}"
            frame = frame.f_back


def is_own_fault(frames) -> bool:
    """Whether prove itself has failed, and not what the script calls through a wrapper."""
    return bool(frames) and frames[-1].filename.startswith(OWN_FOLDER) and not PASSED_ON.search(frames[-1].line)


def wrap(owner, name: str):
    """A decorator: `function(original, *args, **kwargs)` in place of `owner.name`."""
    original = getattr(owner, name)

    def decorate(function):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        wrapped.append((original, function))
        if isinstance(owner, ModuleType):
            replacements[id(original)] = replacement
        return function

    return decorate


def before(owner, name: str, action) -> None:
    """Call `action` before each call of `owner.name`, with the same arguments."""

    @wrap(owner, name)
    def call(original, *args, **kwargs):
        action(*args, **kwargs)
        return original(*args, **kwargs)


def pretend(owner, name: str, answer) -> None:
    """Give this answer to all but PyTorch itself."""

    @wrap(owner, name)
    def ask(original, *args, **kwargs):
        is_of_torch = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return original(*args, **kwargs) if is_of_torch else answer
