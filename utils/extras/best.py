"""The best test results so far, for --save_best, --patience and summary.json."""

import math

from ..console import plural, show, stop

# A metric whose name contains one of these words is better when lower.
LOWER_IS_BETTER = {"loss", "error", "errors", "mse", "rmse", "mae", "nll", "perplexity", "bits", "wer", "cer"}


class Best:
    """The best value of each number in the test results.

    Args:
        save_best: METRIC, min:METRIC or max:METRIC, as in --save_best; None: the loss.
        patience: stop after this many tests without improvement; 0: never.

    Attributes:
        values: [best value, its step] by name.
        tests_since_best: tests since the best value of the monitored metric.
    """

    def __init__(self, save_best: str | None = None, patience: int = 0):
        self.save_best, self.patience = save_best, patience
        self.monitor, self.lower_is_better = metric_direction(save_best or "loss")
        self.load_state({})

    def add(self, numbers: dict[str, float], step: int) -> bool:
        """Add a test result; returns whether it is the best so far by the monitored metric."""
        if (self.save_best or self.patience) and self.monitor not in numbers:
            known = ", ".join(name for name in numbers if name != "samples") or "none"
            flag = f"--save_best {self.monitor}" if self.save_best else "--patience"
            stop(
                f"{flag} needs the metric {self.monitor}, but the test has {known}: name one of these with --save_best"
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
        """Whether --patience has run out; shows: whether this process prints it."""
        stuck = 0 < self.patience <= self.tests_since_best
        if stuck and shows:
            tests = plural(self.tests_since_best, "test")
            show(f"stopped early: {tests} in a row without a better {self.monitor}")
        return stuck

    def state(self) -> dict:
        """The state for a checkpoint, as JSON."""
        return {"best": dict(self.values), "tests_since_best": self.tests_since_best}

    def load_state(self, state: dict) -> None:
        self.values: dict[str, list] = state.get("best", {})
        self.tests_since_best = state.get("tests_since_best", 0)

    def summary(self) -> dict:
        """For summary.json: the best value of each number and, with --save_best, the step of the saved model."""
        best = {f"best_{name}": value for name, (value, _) in self.values.items() if name != "samples"}
        if self.save_best and self.monitor in self.values:
            best["best_step"] = self.values[self.monitor][1]
        return best


def to_python(value):
    """Convert tensors and NumPy values to Python numbers or lists; return anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value) -> bool:
    """Whether a value is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def metric_direction(metric: str) -> tuple[str, bool]:
    """The name in METRIC, min:METRIC or max:METRIC, and whether lower is better, as it is for losses and errors."""
    direction, _, name = metric.partition(":")
    if direction in ("min", "max") and name:
        return name, direction == "min"
    return metric, not LOWER_IS_BETTER.isdisjoint(metric.lower().split("_"))


def is_better(value: float, best: float, lower_is_better: bool) -> bool:
    """Any number is better than NaN."""
    if math.isnan(best):
        return not math.isnan(value)
    return value < best if lower_is_better else value > best
