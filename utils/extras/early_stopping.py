"""--patience: end a run whose test no longer gets better."""

from ..best import Best
from ..console import plural, show


class EarlyStopping:
    """Stops after `patience` tests in a row that were not better than the best one."""

    def __init__(self, patience: int, best: Best):
        self.patience, self.best = patience, best

    def is_due(self) -> bool:
        return self.best.tests_since_best >= self.patience

    def announce(self) -> None:
        tests = plural(self.best.tests_since_best, "test")
        show(f"stopped early: {tests} in a row without a better {self.best.monitor}")
