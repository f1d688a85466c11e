"""Profile a few steps (--profile): how long each part of a step takes, and a trace."""

import atexit
import collections
import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..console import show

WARM_UP = 10  # steps before the recording: memory is allocated, kernels are chosen, DDP rebuilds its buckets
OPERATORS = 30  # rows of torch's own table


class Profiler:
    """Records steps with torch.profiler, after the first WARM_UP. The run continues afterwards.

    Hooks mark the forward pass, the backward pass and the optimizer's step; the training loop calls only `waits` and
    `step`. The device is synchronized before and after each part; otherwise a GPU's time would be attributed to
    whatever part of the code next waits for it.

    Writes profile/trace_rank<r>.json.gz for each process, to open with https://ui.perfetto.dev, and profile/table.txt.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, steps: int, models: list, optimizers: list):
        self.accelerator, self.folder, self.steps = accelerator, folder / "profile", steps
        self.synchronize = torch.get_device_module(accelerator.device).synchronize
        if accelerator.device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # suppresses its warning that there is no GPU
        self.open = []  # the step and the part of it that are being recorded
        self.names = {}  # of all parts, in order of first occurrence
        self.around_backward = functools.partial(self.phase, "backward")
        accelerator.around_backward.append(self.around_backward)
        self.hooks = []
        for model in models:
            self.hooks.append(model.register_forward_pre_hook(lambda *_: self._enter("forward")))
            self.hooks.append(model.register_forward_hook(lambda *_: self._leave()))
        for optimizer in optimizers:
            self.hooks.append(optimizer.optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer")))
            self.hooks.append(optimizer.optimizer.register_step_post_hook(lambda *_: self._leave()))
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
            self.names[name] = None
            self.open.append(torch.profiler.record_function(name))
            self.open[-1].__enter__()

    def _leave(self) -> None:
        if self.open:
            self.synchronize()
            self.open.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def phase(self, name: str):
        """Context manager or decorator: a part of the step with its own row in the table. Parts must not be nested."""
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
            with self.phase("data wait"):
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
        """Write the traces and the table, and print the table. Collective."""
        events, on_gpu = recorder.events(), self.accelerator.device.type == "cuda"
        parts = mean_ms(events, list(self.names), self.steps)
        text = as_text(gather_object([parts]), self.steps, self.folder)
        if self.accelerator.is_main_process:
            show(text)
            if on_gpu and all(event.device_type == torch.autograd.DeviceType.CPU for event in events):
                show("warning: no GPU events, so no communication: CUPTI may lack the right to record them", "yellow")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(self.folder / f"trace_rank{self.accelerator.process_index}.json.gz"))
            if self.accelerator.is_main_process:
                time = "self_cpu_time_total" if self.accelerator.device.type == "cpu" else "self_device_time_total"
                operators = recorder.key_averages().table(sort_by=time, row_limit=OPERATORS)
                (self.folder / "table.txt").write_text(f"{text}\n\n{operators}\n")
        except OSError as error:
            show(f"warning: no trace in {self.folder}: {error.strerror}", "yellow")
        for hook in self.hooks:
            hook.remove()
        self.accelerator.around_backward.remove(self.around_backward)
        self.recorder = None


def mean_ms(events: list, names: list[str], steps: int) -> dict[str, float]:
    """Mean milliseconds per step of each part, of communication, and of communication that overlaps computation."""
    spans = collections.defaultdict(list)
    for event in events:
        name, on_device = event.name, event.device_type != torch.autograd.DeviceType.CPU
        if on_device and event.is_user_annotation:  # a copy of the CPU's
            continue
        if name.startswith("gloo:") or (on_device and "nccl" in name.lower()):
            name = "communication"
        elif on_device:
            name = "kernel"
        elif name.startswith("autograd::engine::evaluate_function"):
            name = "gradient"
        spans[name].append((event.time_range.start, event.time_range.end))
    total = {name: covered(spans[name]) for name in names}
    step = total.pop("step")
    total |= {"other": step - sum(total.values()), "step": step}
    sent = [span for span in spans["communication"] if any(begin <= span[0] < end for begin, end in spans["step"])]
    computed = spans["kernel"] or spans["gradient"]  # on a CPU, the backward pass
    total["communication"] = covered(sent)
    # |A and B| = |A| + |B| - |A or B|
    total["  overlapped"] = covered(sent) + covered(computed) - covered(sent + computed)
    return {name: us / steps / 1000 for name, us in total.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """The total time covered by the spans (begin, end); overlaps count once."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def as_text(ranks: list[dict[str, float]], steps: int, folder: Path) -> str:
    """The table for the screen: rank 0's values and, with several ranks, the smallest and the largest one."""
    lines = [f"profile       {steps} steps after the first {WARM_UP}", f"  {'':<15}{'ms':>10}{'of a step':>11}"]
    for name, ms in ranks[0].items():
        values = [rank[name] for rank in ranks]
        over = f"   {min(values):.3f} to {max(values):.3f} over {len(ranks)} ranks" if len(ranks) > 1 else ""
        lines.append(f"  {name:<15}{ms:>10.3f}{ms / ranks[0]['step']:>11.1%}{over}")
    return "\n".join([*lines, f"  {folder}/trace_rank*.json.gz: open with https://ui.perfetto.dev"])
