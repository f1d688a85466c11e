"""A one-line message instead of a traceback, for errors that a user can do something about."""

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from .console import is_local_main, own_line, show, show_error


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


def is_used_outside(error: BaseException) -> bool:
    """Whether a weight that FSDP has sharded was used while it was not gathered."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def used_outside(error: BaseException, trace: TracebackType | None) -> str:
    """The advice for such an error."""
    line = own_line(reversed([*traceback.walk_tb(trace)]))
    return (
        f"a weight is used outside of the forward of its module, at {line}: FSDP gathers it only while that module is "
        "called, so call the module, or raise fsdp_min_num_params of the config file above the module's parameters"
    )
