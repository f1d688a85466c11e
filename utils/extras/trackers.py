"""Log to Accelerate's trackers, such as tensorboard, in addition to metrics.jsonl (--log_with)."""

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from ..console import show, stop


def check_trackers(*wanted) -> list:
    """Combine the arguments, each a tracker, a list of trackers or None, into one list.

    Stops at uninstalled trackers, which Accelerate would silently leave out.
    """
    trackers = []
    for value in wanted:
        if value is not None:
            trackers += value if isinstance(value, (list, tuple)) else [value]
    missing = set(LoggerType.list()) - {"all", *map(str, get_available_trackers())}
    for name in missing.intersection(map(str, trackers)):
        stop(f"--log_with {name} needs a package that is not installed: pip install {name}")
    return trackers


class Trackers:
    """The trackers of a run. If one fails, a warning is printed and it gets no more values."""

    def __init__(self, accelerator: Accelerator, config: dict):
        self.accelerator = accelerator
        accelerator.init_trackers("run", config=config)
        for tracker in accelerator.trackers:
            folder = getattr(tracker, "logging_dir", None)
            if folder is not None:
                accelerator.print(f"{tracker.name:<12}  {folder}", flush=True)

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
                show(f"warning: the tracker {tracker.name} failed and gets no more values: {reason}", "yellow")
