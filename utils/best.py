"""The best test result so far, for --save_best, --patience and summary.json."""

import math

from .console import plural, show, stop
from .metrics import is_loss


class Best:
    """The best value of one number in the test results.

    Args:
        save_best: min:METRIC, max:METRIC or a loss, as in --save_best; None: the loss.
        patience: stop after this many tests without improvement; 0: never.

    Attributes:
        best: [best value, its step]; empty before the first one.
        tests_since_best: tests since then.
    """

    def __init__(self, save_best: str | None = None, patience: int = 0):
        self.save_best, self.patience = save_best, patience
        self.direction, _, self.monitor = (save_best or "loss").partition(":")
        if not self.monitor or self.direction not in ("min", "max"):
            self.direction, self.monitor = "min", save_best or "loss"
            if not is_loss(self.monitor):
                stop(f"--save_best {save_best} does not say which is best: write min:{save_best} or max:{save_best}")
        self.load_state({})

    def add(self, numbers: dict[str, float], step: int) -> bool:
        """Add a test result; returns whether it is the best so far. NaN never is."""
        if (self.save_best or self.patience) and self.monitor not in numbers:
            known = ", ".join(name for name in numbers if name != "samples") or "none"
            flag = f"--save_best {self.monitor}" if self.save_best else "--patience"
            stop(f"{flag} needs the metric {self.monitor}, but the test has {known}: name one with --save_best")
        value = numbers.get(self.monitor, math.nan)
        best, _ = self.best or (math.inf if self.direction == "min" else -math.inf, 0)
        is_better = value < best if self.direction == "min" else value > best
        if is_better:
            self.best = [value, step]
        self.tests_since_best = 0 if is_better else self.tests_since_best + 1
        return is_better

    def is_stuck(self, shows: bool) -> bool:
        """Whether --patience has run out; shows: whether this process prints it."""
        stuck = 0 < self.patience <= self.tests_since_best
        if stuck and shows:
            show(f"stopped early: {plural(self.tests_since_best, 'test')} in a row without a better {self.monitor}")
        return stuck

    def state(self) -> dict:
        """The state for a checkpoint, as JSON."""
        return {"best": self.best, "tests_since_best": self.tests_since_best}

    def load_state(self, state: dict) -> None:
        self.best: list = state.get("best", [])
        self.tests_since_best = state.get("tests_since_best", 0)

    def summary(self) -> dict:
        """For summary.json: the best value and its step."""
        return {f"best_{self.monitor}": self.best[0], "best_step": self.best[1]} if self.best else {}


def to_python(value):
    """Convert tensors and NumPy values to Python numbers or lists; return anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value) -> bool:
    """Whether a value is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
