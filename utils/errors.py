"""One sentence in place of a traceback, for the errors that a user can do something about."""

import sys
from collections.abc import Callable
from types import TracebackType

from .console import is_local_main, report_to_launcher, show


class ExplainedErrors:
    """A sys.excepthook with a list of explanations; an error that none of them matches keeps its traceback.

    Attributes:
        explanations: pairs (matches(error), sentence(error, traceback)); the first that matches counts. Every process
            prints its own sentence, since others may have a different one, and hands it to the launcher.
    """

    def __init__(self):
        self.explanations: list[tuple[Callable, Callable]] = []
        # A second run in one process replaces the explanations of the first.
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
    """From now on, uncaught errors are explained; returns the object to add explanations to."""
    sys.excepthook = ExplainedErrors()
    return sys.excepthook
