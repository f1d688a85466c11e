"""Which test was the best so far: for --save_best, for --patience, and for summary.json."""

import math

# Words in the names of metrics of which less is better.
LOWER_IS_BETTER = {"loss", "error", "errors", "mse", "rmse", "mae", "nll", "perplexity", "bits", "wer", "cer"}


class Best:
    """The best value of each number of the tests.

    Args:
        monitor: METRIC, min:METRIC or max:METRIC, as --save_best takes it; None: the loss. As an attribute, the name.

    Attributes:
        values: by name, [best value, its step].
        tests_since_best: of the monitored one; 0: the last test was the best.
    """

    def __init__(self, monitor: str | None):
        self.monitor, self.lower_is_better = metric_direction(monitor or "loss")
        self.load_state({})

    def add(self, numbers: dict[str, float], step: int) -> None:
        """Take the numbers of a test into account."""
        self.tests_since_best += 1
        for name, value in numbers.items():
            lower = self.lower_is_better if name == self.monitor else metric_direction(name)[1]
            if name not in self.values or is_better(value, self.values[name][0], lower):
                self.values[name] = [value, step]
                if name == self.monitor:
                    self.tests_since_best = 0

    def is_stuck(self, patience: int) -> bool:
        """Whether the last `patience` tests were not better than the best one; never with patience 0."""
        return 0 < patience <= self.tests_since_best

    def state(self) -> dict:
        """For a checkpoint, as JSON."""
        return {"best": dict(self.values), "tests_since_best": self.tests_since_best}

    def load_state(self, state: dict) -> None:
        self.values: dict[str, list] = state.get("best", {})
        self.tests_since_best = state.get("tests_since_best", 0)


def plain(value):
    """A tensor, an array or a number of NumPy's as numbers of Python's, alone or in lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value) -> bool:
    """Whether a value can be compared and drawn: no bool, text or list."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def metric_direction(metric: str) -> tuple[str, bool]:
    """The name in METRIC, min:METRIC or max:METRIC, and whether less is better: by default for losses and errors."""
    direction, _, name = metric.partition(":")
    if direction in ("min", "max") and name:
        return name, direction == "min"
    return metric, not LOWER_IS_BETTER.isdisjoint(metric.lower().split("_"))


def is_better(value: float, best: float, lower_is_better: bool) -> bool:
    """Any number is better than NaN."""
    if math.isnan(best):
        return not math.isnan(value)
    return value < best if lower_is_better else value > best
