"""What a run shows while it runs, and how long its parts take."""

import datetime
import math
import sys
import time
from collections.abc import Iterable, Iterator

from .console import show

TEST_LINE_EVERY_S = 20  # where no bar shows it


class Progress:
    """The lines on the screen, a bar on a terminal, and the speed of this launch.

    Args:
        step: optimizer steps done before this launch.
        total_steps, steps_per_epoch: of the run.
        test_steps: a guess of the time of a test, in steps.
        shows: whether this process prints.
    """

    def __init__(self, step: int, total_steps: int, steps_per_epoch: int, test_steps: float, shows: bool):
        self.first_step, self.total_steps, self.steps_per_epoch = step, total_steps, steps_per_epoch
        self.test_steps, self.shows = test_steps, shows
        self.tests_left = math.ceil(total_steps / steps_per_epoch) - max(step - 1, 0) // steps_per_epoch
        self.started_at, self.logged_at = time.time(), time.perf_counter()
        self.timer = Timer()
        self.test_shown_at = 0.0
        self.test_s: float | None = None
        self.is_testing = False
        self.bar = None
        if shows and sys.stderr.isatty():
            from .extras.progress_bar import ProgressBar

            self.bar = ProgressBar(step, total_steps)

    def timed(self, batches: Iterable, batches_per_step: int) -> Iterator:
        """The same batches; adds up the time in this loop, and draws the bar between steps."""
        for batch in self.timer.timed(batches, batches_per_step):
            if self.bar is not None and self.bar.is_due():
                self.draw_bar(self.first_step + self.timer.steps)
            yield batch

    def step_time(self, step: int) -> tuple[float, float]:
        """Seconds per step, and seconds left of the whole run with its tests, at `step`."""
        step_s = self.timer.step_s()
        test_s = self.test_steps * step_s if self.test_s is None else self.test_s
        return step_s, (self.total_steps - step) * step_s + self.tests_left * test_s

    def draw_bar(self, step: int, doing: str = "testing") -> None:
        if self.bar is None:
            return
        step_s, left_s = self.step_time(step)
        if step_s and not self.is_testing:
            doing = f"{1 / step_s:.1f} steps/s" if step_s < 1 else f"{step_s:.1f} s/step"
        self.bar.draw(step, f"{doing}, {clock(left_s)} left" if step_s else "")

    def show_test(self, step: int, done: int, total: int) -> None:
        """How far a test is: in the bar, or in a log file as a line now and then."""
        now = time.perf_counter()
        if self.bar is not None:
            if self.bar.is_due():
                self.draw_bar(step, f"testing {done}/{total}")
        elif self.shows and now > max(self.test_shown_at, self.logged_at) + TEST_LINE_EVERY_S:
            self.test_shown_at = now
            show(f"test  step {step}/{self.total_steps}  {done} of {total} samples")

    def show_line(self, split: str, step: int, epoch: int, metrics: dict) -> None:
        """A line of metrics.jsonl for people, with the time left."""
        if split == "test":
            self.test_s = time.perf_counter() - self.logged_at
            self.tests_left -= 1
        self.logged_at = time.perf_counter()
        ends = step % self.steps_per_epoch == 0 or step == self.total_steps
        self.is_testing = split == "train" and ends
        if not self.shows:
            return
        width = 6 + 2 * len(str(self.total_steps))  # the columns stay where they are
        words = [f"{split:<5} epoch {epoch:g}", f"step {step}/{self.total_steps}".ljust(width)]
        hidden = {"samples"} | ({"data_wait_pct"} if metrics.get("data_wait_pct", 10) < 10 else set())
        words += [metric_text(name, value) for name, value in metrics.items() if name not in hidden]
        if self.bar is None and split == "train" and self.timer.steps:
            words.append(f"eta {clock(self.step_time(step)[1])}")
        show("  ".join(words))
        if split == "test" and self.tests_left == 0:
            self.close()
        self.draw_bar(step)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def summary(self, step: int) -> dict:
        """The times of this launch, for summary.json."""
        timer = self.timer
        return {
            "wall_time_s": round(time.time() - self.started_at, 3),
            "train_time_s": round(timer.train_s, 3),
            "train_steps_timed": step - self.first_step,
            "samples_per_s": round(timer.samples / max(timer.train_s, 1e-9), 1),
        }


class Timer:
    """How long training takes, and how much of that is waiting for data.

    Attributes:
        samples: of the steps done; the loop adds them.
        steps: done in this launch.
        train_s, wait_s: seconds in the loop, and of these waiting for batches.
    """

    def __init__(self):
        self.samples = self.batches = self.steps = 0
        self.train_s = self.wait_s = 0.0
        self.first_step_s = self.steps_s = 0.0
        self.in_body_since: float | None = None
        self.last_line = (0.0, 0.0, 0)  # train_s, wait_s and samples at the last log line

    def timed(self, batches: Iterable, batches_per_step: int) -> Iterator:
        """The same batches; adds up the time in this loop."""
        asked = time.perf_counter()
        for batch in batches:
            self.in_body_since = got = time.perf_counter()
            self.wait_s += got - asked
            self.train_s += got - asked
            try:
                yield batch
            finally:  # also when the loop is left by break
                asked = time.perf_counter()
                self.train_s += asked - got
                self.in_body_since = None
                self.batches += 1
                if self.batches % batches_per_step == 0:
                    self.steps, self.steps_s = self.steps + 1, self.train_s
                    self.first_step_s = self.first_step_s or self.steps_s

    def step_s(self) -> float:
        """Seconds per step. The first one allocates memory and chooses kernels: it counts only while it is alone."""
        if self.steps > 1:
            return (self.steps_s - self.first_step_s) / (self.steps - 1)
        return self.steps_s

    def since_last_line(self) -> dict[str, float]:
        """Speed, and the share of waiting for data, since the last call."""
        train_s = self.train_s
        if self.in_body_since is not None:
            train_s += time.perf_counter() - self.in_body_since
        now = (train_s, self.wait_s, self.samples)
        train_s, wait_s, samples = (new - old for new, old in zip(now, self.last_line, strict=True))
        self.last_line = now
        return {
            "samples_per_s": round(samples / max(train_s, 1e-9), 1),
            "data_wait_pct": round(100 * wait_s / max(train_s, 1e-9), 1),
        }


def clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def metric_text(name: str, value: float) -> str:
    """A metric for the screen, by the last word of its name: loss 0.1234, accuracy 98.19%."""
    if name == "samples_per_s":
        return f"{value:,.0f} samples/s"
    if name == "data_wait_pct":
        return f"{value:.0f}% waiting for data"
    formats = {"loss": "{:.4f}", "accuracy": "{:.2%}", "lr": "{:.2e}"}
    return f"{name} " + formats.get(name.rpartition("_")[2], "{:.4g}").format(value)
