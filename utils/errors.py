"""One sentence in place of a traceback, for the errors that a user can do something about."""

import sys
from collections.abc import Callable
from types import TracebackType

from .console import is_local_main, report_to_launcher, show

Matches = Callable[[BaseException], bool]
Sentence = Callable[[BaseException, TracebackType | None], str]


class ExplainedErrors:
    """A sys.excepthook with a list of explanations; an error that none of them matches keeps its traceback.

    explanations: pairs (matches, sentence), the first that matches counts. `sentence(error, traceback)` is
        printed by every process that has the error, since others may have a different one, and is what the
        launcher reports at its end.
    """

    def __init__(self):
        self.explanations: list[tuple[Matches, Sentence]] = []
        self.other_hook = sys.excepthook

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
    """From now on, uncaught errors are explained; returns the list to add explanations to.

    A second call in one process begins with an empty list, and replaces the first.
    """
    errors = ExplainedErrors()
    if isinstance(sys.excepthook, ExplainedErrors):
        errors.other_hook = sys.excepthook.other_hook
    sys.excepthook = errors
    return errors
