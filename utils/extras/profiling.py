"""Profile a few steps (--profile): how long each part of a step takes, and a trace."""

import atexit
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from ..console import show

WARM_UP = 10  # steps before the recording: memory is allocated, kernels are chosen, DDP rebuilds its buckets
ROWS = 24  # of the table on the screen


class Profiler:
    """Records steps with torch.profiler, after the first WARM_UP. The run continues afterwards.

    Hooks label the forward and the backward pass, torch the optimizer's step; the training loop calls only `waits` and
    `step`. The device is synchronized before and after each part; otherwise a GPU's time would be attributed to
    whatever part of the code next waits for it.

    Writes profile/trace_rank<r>.json.gz for each process, to open with https://ui.perfetto.dev, and profile/table.txt.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, steps: int, models: list):
        self.accelerator, self.folder, self.steps = accelerator, folder / "profile", steps
        self.synchronize = torch.get_device_module(accelerator.device).synchronize
        if accelerator.device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses its warning that there is no GPU
        self.open = []  # the step and the part of it that are being recorded
        self.around_backward = functools.partial(self.part, "backward")
        accelerator.around_backward.append(self.around_backward)
        self.hooks = []
        for model in models:
            self.hooks.append(model.register_forward_pre_hook(lambda *_: self._enter("forward")))
            self.hooks.append(model.register_forward_hook(lambda *_: self._leave()))
        self.recorder = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._report,
            acc_events=True,
        )
        self.recorder.start()
        atexit.register(self._abandon)

    def _abandon(self) -> None:
        """Stop the recording at exit; a process that exits while recording crashes and loses its exit code."""
        if self.recorder is not None:
            self.recorder.on_trace_ready = None
            self.recorder.stop()

    def _enter(self, name: str) -> None:
        if self.recorder is not None and (self.open or name == "step"):  # forward passes outside of steps are tests
            self.synchronize()
            self.open.append(torch.profiler.record_function(name))
            self.open[-1].__enter__()

    def _leave(self) -> None:
        if self.open:
            self.synchronize()
            self.open.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def part(self, name: str):
        """A part of the step, with its own row in the table."""
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def waits(self, batches: Iterable) -> Iterator:
        """Yield the batches. Requesting the first one of a step begins the step, with the part "data wait"."""
        batches = iter(batches)
        while True:
            if not self.open:
                self._enter("step")
            with self.part("data wait"):
                batch = next(batches, None)
            if batch is None:
                break
            yield batch
        self._leave()

    def step(self) -> None:
        """End a step. Logging, tests and checkpoints before the next batch are not part of any step."""
        self._leave()
        if self.recorder is not None:
            self.recorder.step()

    def _report(self, recorder) -> None:
        """Write the trace and the table, and print the table's first rows."""
        name = f"trace_rank{self.accelerator.process_index}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(self.folder / name))
            if self.accelerator.is_main_process:
                averages = recorder.key_averages()
                device = "cpu" if self.accelerator.device.type == "cpu" else "device"
                table = functools.partial(averages.table, sort_by=f"{device}_time_total")
                show(f"profile of {self.steps} steps on rank 0; the whole table and traces are in {self.folder}")
                show(table(row_limit=ROWS, max_name_column_width=40))
                (self.folder / "table.txt").write_text(table(row_limit=-1))
        except OSError as error:
            show(f"warning: no trace in {self.folder}: {error.strerror}", "yellow")
        for hook in self.hooks:
            hook.remove()
        self.accelerator.around_backward.remove(self.around_backward)
        self.recorder = None
