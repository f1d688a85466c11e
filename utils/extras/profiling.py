"""A profile of some steps: how long each part of a step takes, and a trace to look at."""

import contextlib
import functools
import gzip
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..console import show, stop

# Steps before the recording, in which memory is allocated, kernels are chosen, and DDP rebuilds
# its buckets.
WARM_UP = 10


class Profiler:
    """Records steps with torch.profiler, after the first WARM_UP; with `steps=0` does nothing.

    Hooks mark the forward pass, the backward pass and the optimizer's step. The training loop only
    calls `waits` and `step`. The device is synchronized at the beginning and end of each part;
    otherwise the time of a GPU's work would count where the CPU next waits for it. The hooks are
    removed after the recording, and the run continues.

    Writes profile/trace_rank<r>.json.gz for each process, to open with https://ui.perfetto.dev, and
    profile/table.json.

    Args:
        folder: of the run.
        steps: how many to record.
        models, optimizers: as `prepare` returned them.
        steps_left: of the run.

    Raises:
        SystemExit: if fewer steps are left than the profile needs.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, steps: int, models: list, optimizers: list, steps_left: int
    ):
        self.accelerator = accelerator
        self.steps = steps
        self.recorder = None
        if not steps:
            return
        if steps_left < WARM_UP + steps:
            stop(
                f"--profile {steps} takes {WARM_UP + steps} steps, {WARM_UP} of them to warm "
                f"up, and this run has {steps_left} to go"
            )
        if accelerator.device.type == "cpu":
            # Otherwise the profiling library warns on stderr that it finds no GPU.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.folder = folder / "profile"
        self.open = []  # the step and its part that are being recorded
        self.names = {}  # of all parts, in the order of their first occurrence
        self.unrecorded_s = []  # by step
        self.around_backward = functools.partial(self.phase, "backward")
        accelerator.around_backward.append(self.around_backward)
        self.hooks = []
        for model in models:
            self.hooks.append(model.register_forward_pre_hook(lambda *_: self._enter("forward")))
            self.hooks.append(model.register_forward_hook(lambda *_: self._leave()))
        for optimizer in optimizers:
            optimizer = optimizer.optimizer
            self.hooks.append(optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer")))
            self.hooks.append(optimizer.register_step_post_hook(lambda *_: self._leave()))
        self.recorder = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._report,
            acc_events=True,
        )
        self.recorder.start()

    def _synchronize(self) -> None:
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()

    def _enter(self, name: str) -> None:
        if self.open or name == "step":  # a forward pass outside of a step is a test's
            self._synchronize()
            self.names[name] = None
            self.open.append(torch.profiler.record_function(name))
            self.open[-1].__enter__()

    def _leave(self) -> None:
        if self.open:
            self._synchronize()
            self.open.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def phase(self, name: str):
        """A part of the step with its own row in the table; parts must not be nested.

        Also a decorator of functions.
        """
        if self.recorder is None:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def waits(self, batches: Iterable) -> Iterator:
        """The same batches. The time until each is ready is the part "data wait".

        Asking for the first batch of a step begins the step.
        """
        if self.recorder is None:
            yield from batches
            return
        batches = iter(batches)
        while True:
            if self.recorder is not None and not self.open:
                self.began = time.perf_counter()
                self._enter("step")
            with self.phase("data wait"):
                batch = next(batches, None)
            if batch is None:
                break
            yield batch
        if self.recorder is not None:
            self._leave()

    def step(self) -> None:
        """End a step. Logs, tests and checkpoints before the next batch belong to no step."""
        if self.recorder is not None:
            self._leave()
            self.unrecorded_s.append(time.perf_counter() - self.began)
            self.recorder.step()

    def _report(self, recorder) -> None:
        """Write the traces and the table, and print the table. Collective."""
        path = self.folder / f"trace_rank{self.accelerator.process_index}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(path))
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            table = summarize(events, list(self.names), self.steps)
        except OSError as error:
            table = {"problem": f"{path} cannot be written: {error.strerror}"}
        unrecorded_s = statistics.median(self.unrecorded_s[: WARM_UP - 1])
        table["unrecorded_ms"] = round(1000 * unrecorded_s, 3)
        tables = gather_object([table])
        if self.accelerator.is_main_process:
            self._show(tables)
        for hook in self.hooks:
            hook.remove()
        self.accelerator.around_backward.remove(self.around_backward)
        self.recorder = None

    def _show(self, tables: list[dict]) -> None:
        problems = [table["problem"] for table in tables if "problem" in table]
        if problems:
            show(f"warning: no profile: {problems[0]}", "yellow")
            return
        show(as_text(tables, self.folder))
        path = self.folder / "table.json"
        try:
            path.write_text(json.dumps(tables, indent=2) + "\n")
        except OSError as error:
            show(f"warning: {path} cannot be written: {error.strerror}", "yellow")


def total_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total time covered by the intervals (begin, end); overlaps count once."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summarize(events: list[dict], names: list[str], steps: int) -> dict:
    """Mean time of a step in ms, by part, from the events of a trace in Chrome's format.

    Args:
        names: "step" and the names of its parts.
        steps: how many the trace has.

    Returns:
        mean_ms: by part, with "other" for the rest of the step.
        communication_ms: time in which NCCL kernels ran, or threads of gloo worked.
        overlapped_ms: the part of it in which computation ran too: any other kernel of a GPU, or
            on a CPU the operations of the backward pass.

    Source: Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    events = [event for event in events if event.get("ph") == "X"]

    def spans(matches):
        return [(event["ts"], event["ts"] + event["dur"]) for event in events if matches(event)]

    def annotated(name):
        return spans(lambda event: event["cat"] == "user_annotation" and event["name"] == name)

    def is_nccl(event):
        return event["cat"] == "kernel" and "nccl" in event["name"].lower()

    def is_gloo(event):
        return event["cat"] == "user_annotation" and event["name"].startswith("gloo:")

    def is_other_kernel(event):
        return event["cat"] == "kernel" and not is_nccl(event)

    def is_backward_operation(event):
        return event["name"].startswith("autograd::engine::evaluate_function")

    inside = annotated("step")
    parts = {name: total_length(annotated(name)) for name in names if name != "step"}
    parts["other"] = total_length(inside) - sum(parts.values())
    parts["step"] = total_length(inside)

    communication = []
    for span in spans(is_nccl) + spans(is_gloo):
        if any(begin <= span[0] < end for begin, end in inside):
            communication.append(span)
    computation = spans(is_other_kernel) or spans(is_backward_operation)
    # |A and B| = |A| + |B| - |A or B|
    overlapped = total_length(communication) + total_length(computation)
    overlapped -= total_length(communication + computation)

    def mean_ms(us):
        return round(us / steps / 1000, 4)

    return {
        "steps": steps,
        "mean_ms": {name: mean_ms(us) for name, us in parts.items()},
        "communication_ms": mean_ms(total_length(communication)),
        "overlapped_ms": mean_ms(overlapped),
    }


def as_text(tables: list[dict], folder: Path) -> str:
    """The table for the screen: rank 0, and with several ranks the smallest and largest value."""
    first = tables[0]
    several = len(tables) > 1
    lines = [f"profile       {first['steps']} steps after the first {WARM_UP}"]
    lines.append(f"  {'':<15}{'ms':>10}{'share':>9}")
    if several:
        lines[-1] += f"   over {len(tables)} ranks"

    def add_row(name, values, whole):
        row = f"  {name:<15}{values[0]:>10.3f}{values[0] / whole:>9.1%}"
        if several:
            row += f"   {min(values):.3f} to {max(values):.3f}"
        lines.append(row)

    step_ms = first["mean_ms"]["step"]
    for name in first["mean_ms"]:
        add_row(name, [table["mean_ms"][name] for table in tables], step_ms)
    communication_ms = first["communication_ms"]
    if communication_ms:
        add_row("communication", [table["communication_ms"] for table in tables], step_ms)
        add_row("  overlapped", [table["overlapped_ms"] for table in tables], communication_ms)
        lines[-1] += "   with computation, share of the communication"
    lines.append(f"  unrecorded     {first['unrecorded_ms']:>10.3f}            a step before the recording")
    lines.append(f"  {folder}/trace_rank*.json.gz: open with https://ui.perfetto.dev")
    return "\n".join(lines)
