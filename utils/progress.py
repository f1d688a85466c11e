"""The progress of a run on the screen, its times, and its peak memory."""

import datetime
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .best import is_number
from .console import plural, show


class Progress:
    """Prints log lines, and measures the speed of this launch.

    Args:
        step: optimizer steps done before this launch.
        shows: whether this process prints.
    """

    def __init__(self, step: int, total_steps: int, shows: bool):
        self.first_step, self.total_steps, self.shows = step, total_steps, shows
        self.started_at = time.perf_counter()
        self.samples, self.wait_s = 0, 0.0  # done in this launch; spent waiting for batches
        self.earlier_s, self.loop_began_at = 0.0, None  # seconds in loops that have ended
        self.last_line = (0.0, 0.0, 0)  # train_s, wait_s and samples at the last log line

    @property
    def train_s(self) -> float:
        """Seconds in the training loop."""
        return self.earlier_s + (time.perf_counter() - self.loop_began_at if self.loop_began_at is not None else 0)

    def timed(self, batches: Iterable) -> Iterator:
        """Yield the batches, timing the loop."""
        self.loop_began_at = requested_at = time.perf_counter()
        try:
            for batch in batches:
                self.wait_s += time.perf_counter() - requested_at
                yield batch
                requested_at = time.perf_counter()
        finally:  # also after a break
            self.earlier_s, self.loop_began_at = self.train_s, None

    def since_last_line(self) -> dict[str, float]:
        """Speed, and the percentage of time spent waiting for data, since the last call."""
        now = (self.train_s, self.wait_s, self.samples)
        train_s, wait_s, samples = (new - old for new, old in zip(now, self.last_line, strict=True))
        self.last_line = now
        return {
            "samples_per_s": round(samples / max(train_s, 1e-9), 1),
            "data_wait_pct": round(100 * wait_s / max(train_s, 1e-9), 1),
        }

    def show_line(self, split: str, step: int, epoch: int, metrics: dict, speeds: dict) -> None:
        """Print a line of metrics.jsonl in a readable form, with the training time left."""
        if not self.shows:
            return
        width = 6 + 2 * len(str(self.total_steps))  # keeps columns aligned
        columns = [f"{split:<5} epoch {epoch:g}", f"step {step}/{self.total_steps}".ljust(width)]
        hidden = {"samples"} | ({"data_wait_pct"} if metrics.get("data_wait_pct", 10) < 10 else set())
        columns += [metric_text(name, value) for name, value in metrics.items() if name not in hidden]
        speeds = {unit: metrics["samples_per_s"] * x for unit, x in speeds.items() if "samples_per_s" in metrics}
        columns += [f"{speed:,.0f} {unit}" if speed >= 10 else f"{speed:.2f} {unit}" for unit, speed in speeds.items()]
        if split == "train" and step > self.first_step:
            left_s = (self.total_steps - step) * self.train_s / (step - self.first_step)
            columns.append(f"eta {datetime.timedelta(seconds=round(left_s))}")
        show("  ".join(columns))

    def say_done(self, step: int, result: dict, folder: Path) -> None:
        """Print the result of the last test, and where the files are."""
        numbers = {name: value for name, value in result.items() if is_number(value) and name != "samples"}
        shown = ", ".join(f"test {metric_text(name, value)}" for name, value in numbers.items()) or plural(step, "step")
        show(f"done: {shown} in {self.train_s:.1f} s of training; the model and its numbers are in {folder}")

    def summary(self, step: int) -> dict:
        """The times of this launch, for summary.json."""
        return {
            "wall_time_s": round(time.perf_counter() - self.started_at, 3),
            "train_time_s": round(self.train_s, 3),
            "train_steps_timed": step - self.first_step,
            "samples_per_s": round(self.samples / max(self.train_s, 1e-9), 1),
        }


def metric_text(name: str, value: float) -> str:
    """A metric for the screen, formatted by the last word of its name: loss 0.1234, accuracy 98.19%."""
    whole = {"samples_per_s": "{:,.0f} samples/s", "data_wait_pct": "{:.0f}% waiting for data"}
    by_last_word = {"loss": "{:.4f}", "accuracy": "{:.2%}", "lr": "{:.2e}"}
    if name in whole:
        return whole[name].format(value)
    return f"{name} " + by_last_word.get(name.rpartition("_")[2], "{:.4g}").format(value)


def own_peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: of the tensors on its fullest NVIDIA or AMD GPU; otherwise of everything."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / 2**30
    if sys.platform == "linux":
        # Not getrusage, whose peak includes the launcher's memory from before this program started.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # in bytes on macOS


def peak_memory_gib(accelerator: Accelerator) -> float:
    """The largest `own_peak_memory_gib` of all processes. Collective."""
    return max(gather_object([own_peak_memory_gib(accelerator.device)]))
