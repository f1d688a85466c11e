"""Where the time of an update goes: a table, and a trace to look at."""

import argparse
import contextlib
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

from utils import show, stop

WARM_UP = 10  # updates before the recording: memory is allocated, kernels are chosen, DDP builds its buckets anew


class Profiler:
    """Records `args.profile` updates after the first WARM_UP with torch.profiler; with 0 it does nothing at all.

    Hooks name the parts of an update, so that a training loop calls `waits` and `step` alone. At the borders of the
    parts the device is waited for: else a GPU's work would count where the CPU next waits for it. After the recording
    the hooks are gone, and the run goes on.

    Leaves profile/trace_rank<r>.json.gz for https://ui.perfetto.dev, one a process, and profile/table.json.
    """

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace, model, optimizer, updates_left: int):
        """model, optimizer: as `prepare` returned them. Raises: SystemExit if fewer updates are left than it takes."""
        self.accelerator, self.updates, self.recorder = accelerator, args.profile, None
        if not self.updates:
            return
        if updates_left < WARM_UP + self.updates:
            stop(
                f"--profile {self.updates} takes {WARM_UP + self.updates} updates, {WARM_UP} of them to warm up, and "
                f"this run has {updates_left} to go"
            )
        if accelerator.device.type == "cpu":  # else the library that records says on stderr that it finds no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self.folder = Path(args.output_dir) / "profile"
        self.open, self.names, self.unrecorded_s = [], {}, []
        accelerator.backward = self.phase("backward")(accelerator.backward)
        self.hooks = [
            model.register_forward_pre_hook(lambda *_: self._enter("forward")),
            model.register_forward_hook(lambda *_: self._leave()),
            optimizer.optimizer.register_step_pre_hook(lambda *_: self._enter("optimizer")),
            optimizer.optimizer.register_step_post_hook(lambda *_: self._leave()),
        ]
        self.recorder = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=self.updates, repeat=1),
            on_trace_ready=self._report,
            acc_events=True,
        )
        self.recorder.start()

    def _enter(self, name: str) -> None:
        if self.open or name == "update":  # a forward outside of updates is a test's
            if self.accelerator.device.type != "cpu":
                torch.accelerator.synchronize()
            self.names[name] = None
            self.open.append(torch.profiler.record_function(name))
            self.open[-1].__enter__()

    def _leave(self) -> None:
        if self.open:
            if self.accelerator.device.type != "cpu":
                torch.accelerator.synchronize()
            self.open.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def phase(self, name: str):
        """A part of the update with a row of its own in the table; parts do not nest. Usable around a function too."""
        if self.recorder is None:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def waits(self, batches: Iterable) -> Iterator:
        """The same batches; the time until each is there is the data wait, and the first one begins an update."""
        if self.recorder is None:
            yield from batches
            return
        batches = iter(batches)
        while True:
            if self.recorder is not None and not self.open:
                self.began = time.perf_counter()
                self._enter("update")
            with self.phase("data wait"):
                batch = next(batches, None)
            if batch is None:
                break
            yield batch
        if self.recorder is not None:
            self._leave()

    def step(self) -> None:
        """An update is done. What follows until the next batch (logs, tests, checkpoints) belongs to no update."""
        if self.recorder is not None:
            self._leave()
            self.unrecorded_s.append(time.perf_counter() - self.began)
            self.recorder.step()

    def _report(self, recorder) -> None:
        """Write the trace and print the table. A collective."""
        path = self.folder / f"trace_rank{self.accelerator.process_index}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(path))
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            table = summarize(events, list(self.names), self.updates)
        except OSError as error:
            table = {"problem": f"{path} cannot be written: {error.strerror}"}
        unrecorded_ms = 1000 * statistics.median(self.unrecorded_s[: WARM_UP - 1])
        tables = gather_object([{**table, "unrecorded_ms": round(unrecorded_ms, 3)}])
        problems = [table["problem"] for table in tables if "problem" in table]
        if problems and self.accelerator.is_main_process:
            show(f"warning: no profile: {problems[0]}", "yellow")
        elif self.accelerator.is_main_process:
            show(as_text(tables, self.folder))
            try:
                (self.folder / "table.json").write_text(json.dumps(tables, indent=2) + "\n")
            except OSError as error:
                show(f"warning: {self.folder}/table.json cannot be written: {error.strerror}", "yellow")
        for hook in self.hooks:
            hook.remove()
        del self.accelerator.backward  # the class's own one again
        self.recorder = None


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the union of (begin, end)s."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summarize(events: list[dict], names: list[str], updates: int) -> dict:
    """Mean ms of an update, by part, from a trace of `updates` in Chrome's format; names: "update" and its parts.

    communication_ms: in which gloo's threads or NCCL's kernels were at work, each moment once. overlapped_ms: how much
    of it lay under computation: any other kernel of a GPU, or on a CPU what the backward pass computes.
    Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    events = [event for event in events if event.get("ph") == "X"]

    def spans(matches):
        return [(event["ts"], event["ts"] + event["dur"]) for event in events if matches(event)]

    def own(name):
        return spans(lambda event: event["cat"] == "user_annotation" and event["name"] == name)

    inside = own("update")
    parts = {name: length(own(name)) for name in names if name != "update"}
    parts |= {"other": length(inside) - sum(parts.values()), "update": length(inside)}
    nccl = spans(lambda event: event["cat"] == "kernel" and "nccl" in event["name"].lower())
    gloo = spans(lambda event: event["cat"] == "user_annotation" and event["name"].startswith("gloo:"))
    communication = [span for span in nccl + gloo if any(begin <= span[0] < end for begin, end in inside)]
    computation = spans(lambda event: event["cat"] == "kernel" and "nccl" not in event["name"].lower())
    computation = computation or spans(lambda event: event["name"].startswith("autograd::engine::evaluate_function"))
    # |A and B| = |A| + |B| - |A or B|
    overlapped = length(communication) + length(computation) - length(communication + computation)

    def mean_ms(us):
        return round(us / updates / 1000, 4)

    return {
        "updates": updates,
        "mean_ms": {name: mean_ms(us) for name, us in parts.items()},
        "communication_ms": mean_ms(length(communication)),
        "overlapped_ms": mean_ms(overlapped),
    }


def as_text(tables: list[dict], folder: Path) -> str:
    """The table for the screen: of rank 0, with the least and the most of all ranks where there are several."""
    first, several = tables[0], len(tables) > 1
    lines = [
        f"profile       {first['updates']} updates after the first {WARM_UP}",
        f"  {'':<15}{'ms':>10}{'share':>9}" + f"   over {len(tables)} ranks" * several,
    ]

    def row(name, values, whole):
        ranks = f"   {min(values):.3f} to {max(values):.3f}" * several
        lines.append(f"  {name:<15}{values[0]:>10.3f}{values[0] / whole:>9.1%}{ranks}")

    for name in first["mean_ms"]:
        row(name, [table["mean_ms"][name] for table in tables], first["mean_ms"]["update"])
    if first["communication_ms"]:
        row("communication", [table["communication_ms"] for table in tables], first["mean_ms"]["update"])
        row("  overlapped", [table["overlapped_ms"] for table in tables], first["communication_ms"])
        lines[-1] += "   under computation, share of the communication"
    lines.append(f"  unrecorded     {first['unrecorded_ms']:>10.3f}            an update before the recording")
    lines.append(f"  {folder}/trace_rank*.json.gz: open with https://ui.perfetto.dev")
    return "\n".join(lines)
