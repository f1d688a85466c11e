"""Accelerate's trackers, such as tensorboard, which get what metrics.jsonl gets (--log_with)."""

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from .console import stop


def check_trackers(*wanted) -> list:
    """Combine the arguments, each a tracker, a list of trackers or None, into one list.

    Stops at uninstalled trackers, which Accelerate leaves out: huggingface/accelerate#520.
    """
    trackers = []
    for value in wanted:
        if value is not None:
            trackers += value if isinstance(value, (list, tuple)) else [value]
    missing = set(LoggerType.list()) - {"all", *map(str, get_available_trackers())}
    for name in missing.intersection(map(str, trackers)):
        stop(f"--log_with {name} needs a package that is not installed: pip install {name}")
    return trackers
