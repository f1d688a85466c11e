"""A one-line message instead of a traceback, for errors that a user can do something about."""

import sys
from collections.abc import Callable
from types import TracebackType

from .console import is_local_main, report_to_launcher, show


class ExplainedErrors:
    """A sys.excepthook that explains some errors; all others keep their traceback.

    Attributes:
        explanations: pairs of functions, matches(error) and sentence(error, traceback). The first match is printed by
            every process with the error, since theirs may differ, and is reported to the launcher.
    """

    def __init__(self):
        self.explanations: list[tuple[Callable, Callable]] = []
        # A second run in the same process replaces the explanations of the first.
        self.other_hook = getattr(sys.excepthook, "other_hook", sys.excepthook)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if is_local_main():
                show("stopped by Ctrl-C: nothing was saved", "yellow", sys.stderr)
            return
        for matches, sentence in self.explanations:
            if matches(error):
                text = f"error: {sentence(error, trace)}"
                report_to_launcher(text)
                show(text, "red", sys.stderr)
                return
        self.other_hook(kind, error, trace)


def explain_errors() -> ExplainedErrors:
    """Install ExplainedErrors as sys.excepthook."""
    sys.excepthook = ExplainedErrors()
    return sys.excepthook
