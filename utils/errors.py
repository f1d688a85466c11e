"""A one-line message instead of a traceback, for errors that a user can do something about."""

import sys
from collections.abc import Callable
from types import TracebackType

from .console import is_local_main, show, show_error


def explain_errors() -> list[tuple[Callable, Callable]]:
    """Install a sys.excepthook that explains some errors; all others keep their traceback.

    Returns:
        The list of explanations, to be filled: pairs of functions, matches(error) and sentence(error, traceback). The
        first match is printed by every process with the error, since theirs may differ, and reported to the launcher.
    """
    explanations = []

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if is_local_main():
                show("stopped by Ctrl-C: nothing was saved", "yellow", sys.stderr)
            return
        for matches, sentence in explanations:
            if matches(error):
                return show_error(sentence(error, trace))
        hook.other_hook(kind, error, trace)

    # A second run in the same process replaces the explanations of the first.
    hook.other_hook = getattr(sys.excepthook, "other_hook", sys.excepthook)
    sys.excepthook = hook
    return explanations
