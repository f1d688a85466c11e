"""Which test was the best so far: for --save_best, for --patience, and for summary.json."""

import math

from ..console import plural, show, stop

# Words in the names of metrics of which less is better.
LOWER_IS_BETTER = {"loss", "error", "errors", "mse", "rmse", "mae", "nll", "perplexity", "bits", "wer", "cer"}


class Best:
    """The best value of each number of the tests.

    Args:
        save_best: METRIC, min:METRIC or max:METRIC, as --save_best takes it; None: the loss.
        patience: stop after so many tests without a better one; 0: never.

    Attributes:
        values: by name, [best value, its step].
        tests_since_best: of the monitored metric; 0: the last test was the best.
    """

    def __init__(self, save_best: str | None = None, patience: int = 0):
        self.save_best, self.patience = save_best, patience
        self.monitor, self.lower_is_better = metric_direction(save_best or "loss")
        self.load_state({})

    def add(self, numbers: dict[str, float], step: int) -> bool:
        """Take the numbers of a test into account; returns whether it was the best by the monitored metric.

        Raises:
            SystemExit: if a flag needs the monitored metric and the test does not have it.
        """
        if (self.save_best or self.patience) and self.monitor not in numbers:
            known = ", ".join(name for name in numbers if name != "samples") or "none"
            flag = f"--save_best {self.monitor}" if self.save_best else "--patience"
            stop(
                f"{flag} needs the metric {self.monitor}, and the test has {known}: name one of these with --save_best"
            )
        self.tests_since_best += 1
        for name, value in numbers.items():
            lower = self.lower_is_better if name == self.monitor else metric_direction(name)[1]
            if name not in self.values or is_better(value, self.values[name][0], lower):
                self.values[name] = [value, step]
                if name == self.monitor:
                    self.tests_since_best = 0
        return self.tests_since_best == 0

    def is_stuck(self, shows: bool) -> bool:
        """Whether --patience is over; shows: whether this process says so."""
        stuck = 0 < self.patience <= self.tests_since_best
        if stuck and shows:
            tests = plural(self.tests_since_best, "test")
            show(f"stopped early: {tests} in a row without a better {self.monitor}")
        return stuck

    def state(self) -> dict:
        """For a checkpoint, as JSON."""
        return {"best": dict(self.values), "tests_since_best": self.tests_since_best}

    def load_state(self, state: dict) -> None:
        self.values: dict[str, list] = state.get("best", {})
        self.tests_since_best = state.get("tests_since_best", 0)

    def summary(self) -> dict:
        """For summary.json: the best of each number, and with --save_best the step of the model that was kept."""
        best = {f"best_{name}": value for name, (value, _) in self.values.items() if name != "samples"}
        if self.save_best and self.monitor in self.values:
            best["best_step"] = self.values[self.monitor][1]
        return best


def to_python(value):
    """A tensor, an array or a number of NumPy's as Python numbers, alone or in lists; anything else as it is."""
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
