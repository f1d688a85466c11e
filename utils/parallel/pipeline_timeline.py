"""When each stage of a pipeline computes, how long it is idle, and the peak memory of a step.

For timeline.png and summary.json of scripts/model_split.py; a pipeline runs without it.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..extras.curves import plot_timeline
from ..extras.peak_memory import own_peak_memory_gib, reset_peak_memory


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timeline:
    """When each stage of this process ran forward and backward, in the recorded steps.

    GPUs are timed by events in their streams, which delay nothing, a CPU by its clock. The times
    count from `begin`. The caller makes all processes call it at the same moment, because the
    clocks of two machines cannot be compared.

    steps: for each recorded step, a list of (row, stage, "forward" or "backward", micro-batch,
    began_s, ended_s).
    """

    def __init__(self, devices: set[torch.device]):
        self.devices = devices
        self.recording = False
        self.first_micro_batch = 0  # torch's schedules count from 0 each time the pipeline is filled
        self.spans = []
        self.steps = []

    def begin(self) -> None:
        """Begin to record a step."""
        for device in self.devices:
            synchronize(device)
        self.zero = {device: self._mark(device) for device in self.devices}
        self.spans = []
        self.recording = True

    def end(self) -> None:
        """End the recording, and add the step to `steps`."""
        for device in self.devices:
            synchronize(device)
        step = []
        for device, *what, began, ended in self.spans:
            step.append((*what, self._seconds(device, began), self._seconds(device, ended)))
        self.steps.append(step)
        self.recording = False

    @contextlib.contextmanager
    def span(self, row: int, stage: int, kind: str, micro_batch: int, device: torch.device):
        """Record what is done inside. row: the process or device; kind: "forward" or "backward"."""
        if not self.recording:
            yield
            return
        began = self._mark(device)
        yield
        number = self.first_micro_batch + micro_batch
        self.spans.append((device, row, stage, kind, number, began, self._mark(device)))

    def draw(self, accelerator: Accelerator, title: str, picture: Path) -> list[float]:
        """Draw the step in the middle of the recording. Collective.

        Returns:
            The median fraction of a step in which each row was idle.
        """
        steps = []
        for parts_by_rank in zip(*gather_object([self.steps]), strict=True):
            steps.append(list(itertools.chain(*parts_by_rank)))
        idle = [idle_fractions(spans) for spans in steps]
        middle = len(steps) // 2
        if accelerator.is_main_process:
            plot_timeline(steps[middle], idle[middle], title, picture)
        rows = sorted(set().union(*idle))
        medians = []
        for row in rows:
            # In a step of few samples, a row may have had nothing to do.
            fractions = [fractions_by_row.get(row, 1.0) for fractions_by_row in idle]
            medians.append(round(statistics.median(fractions), 4))
        return medians

    def _mark(self, device):
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _seconds(self, device, mark) -> float:
        zero = self.zero[device]
        return mark - zero if device.type != "cuda" else zero.elapsed_time(mark) / 1000


def idle_fractions(spans: list[tuple]) -> dict[int, float]:
    """For each row, the fraction of a step in which it did nothing.

    spans: as in Timeline.steps, of all processes. The step lasts from the first begin to the
    last end.
    """
    length = max(span[5] for span in spans) - min(span[4] for span in spans)
    busy = {}
    for row, _, _, _, began, ended in spans:
        busy[row] = busy.get(row, 0.0) + ended - began
    return {row: 1 - busy[row] / length for row in sorted(busy)}


class StepRecorder:
    """Records timeline and peak memory of the first steps of a launch.

    Make it before the model: peak memory is reported above what the process has at that moment.

    Args:
        devices: of this process.
        num_steps: how many to record, after one for warm-up.
    """

    def __init__(self, devices: list[torch.device], num_steps: int = 10):
        self.devices = devices
        self.num_steps = num_steps
        self.steps_seen = 0
        self.peaks_gib = []  # by step, for each device
        for device in devices:
            reset_peak_memory(device)
        self.start_gib = [own_peak_memory_gib(device) for device in devices]

    @contextlib.contextmanager
    def step(self, accelerator: Accelerator, timeline: Timeline) -> Iterator[None]:
        """Around one step. Collective."""
        recording = 1 <= self.steps_seen <= self.num_steps
        self.steps_seen += 1
        if not recording:
            yield
            return
        for device in self.devices:
            reset_peak_memory(device)
        accelerator.wait_for_everyone()  # a common zero for the timelines of all processes
        timeline.begin()
        yield
        timeline.end()
        self.peaks_gib.append([own_peak_memory_gib(device) for device in self.devices])

    def peak_memory_gib(self) -> list[float]:
        """Peak memory above the start in GiB, by rank and device; [] if none. Collective."""
        if not self.peaks_gib:
            return []
        peaks = []
        for start, *column in zip(self.start_gib, *self.peaks_gib, strict=True):
            peaks.append(max(column) - start)
        return [round(gib, 3) for gib in gather_object(peaks)]

    def report(self, accelerator: Accelerator, timeline: Timeline, title: str, picture: Path) -> dict[str, list[float]]:
        """Peak memory and idle time of the recorded steps, for summary.json; draws the timeline. Collective."""
        peaks_gib = self.peak_memory_gib()
        if not peaks_gib:
            return {}
        return {
            "peak_memory_gib_above_start": peaks_gib,
            "idle_share": timeline.draw(accelerator, title, picture),
        }
