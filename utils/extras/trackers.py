"""--log_with: Accelerate's trackers, such as tensorboard, beside metrics.jsonl."""

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from ..console import show, stop


def check_trackers(*wanted) -> list:
    """The trackers of all arguments, each a tracker, a list of trackers or None, in one list.

    Accelerate itself leaves a tracker out whose package is missing, and does not say so.

    Raises:
        SystemExit: if Accelerate does not know one of them, or its package is not installed.
    """
    trackers = []
    for value in wanted:
        if value is not None:
            trackers += value if isinstance(value, (list, tuple)) else [value]
    for tracker in trackers:
        name = str(tracker)  # a LoggerType of Accelerate becomes its name
        if isinstance(tracker, GeneralTracker) or name == "all":  # all: those that are installed
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            stop(f"Accelerate has no tracker {name}: use --log_with with one of {known}")
        is_built_in = name in LoggerType.list()
        if is_built_in and name not in map(str, get_available_trackers()):
            stop(f"--log_with {name} needs a package that is not installed: pip install {name}")
    return trackers


class Trackers:
    """The trackers of a run. One that fails is a warning, once, and no longer logged to: the numbers are in
    metrics.jsonl in any case.

    Args:
        config: the arguments of the run, for those that show them.
    """

    def __init__(self, accelerator: Accelerator, config: dict):
        self.accelerator = accelerator
        accelerator.init_trackers("run", config=config)
        for tracker in accelerator.trackers:
            place = getattr(tracker, "logging_dir", None)
            if place is not None:
                accelerator.print(f"{tracker.name:<12}  {place}", flush=True)

    def log(self, values: dict, step: int) -> None:
        self._each(lambda tracker: tracker.log(values, step=step))

    def finish(self) -> None:
        self._each(lambda tracker: tracker.finish())
        self.accelerator.trackers = []

    def _each(self, call: Callable[[GeneralTracker], object]) -> None:
        for tracker in list(self.accelerator.trackers):
            try:
                call(tracker)
            except Exception as error:
                self.accelerator.trackers.remove(tracker)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                show(f"warning: the tracker {tracker.name} failed, and gets no more values: {reason}", "yellow")
