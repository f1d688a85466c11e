"""Profile a few steps with torch.profiler (--profile): a table of where the time goes, and a trace."""

import atexit
import functools
import os
from pathlib import Path

import torch
from accelerate import Accelerator

from ..console import show

WARM_UP = 10  # steps before the recording: memory is allocated, kernels are chosen, DDP rebuilds its buckets
ROWS = 24  # of the table on the screen


class Profiler:
    """Records `steps` steps after the first WARM_UP; call `step` after each step. The run continues afterwards.

    Writes profile/trace_rank<r>.json.gz for each process, to open with https://ui.perfetto.dev, and profile/table.txt.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, steps: int):
        self.accelerator, self.folder, self.steps = accelerator, folder / "profile", steps
        if accelerator.device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses its warning that there is no GPU
        recorder = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._report,
            acc_events=True,
        )
        recorder.start()
        self.recorder, self.step = recorder, recorder.step
        atexit.register(self._abandon)

    def _abandon(self) -> None:
        """Stop the recording at exit; a process that exits while recording crashes and loses its exit code."""
        self.recorder.on_trace_ready = None
        self.recorder.stop()

    def _report(self, recorder) -> None:
        """Write the trace and the table, and print the table's first rows."""
        name = f"trace_rank{self.accelerator.process_index}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(self.folder / name))
            if self.accelerator.is_main_process:
                device = "cpu" if self.accelerator.device.type == "cpu" else "device"
                table = functools.partial(recorder.key_averages().table, sort_by=f"{device}_time_total")
                show(f"profile of {self.steps} steps on rank 0; the whole table and traces are in {self.folder}")
                show(table(row_limit=ROWS, max_name_column_width=40))
                (self.folder / "table.txt").write_text(table(row_limit=-1))
        except OSError as error:
            show(f"warning: no trace in {self.folder}: {error.strerror}", "yellow")
