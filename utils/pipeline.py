"""Cut a sequence of blocks into stages that cost the same, run them as a pipeline, and see what it does over time."""

import contextlib
import copy
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from utils import stop


class BlockCost(NamedTuple):
    """What one micro-batch costs in one block."""

    time_s: float  # of forward and backward
    activation_bytes: int  # kept from forward to backward, without what the block before it keeps already
    parameters: int
    parameter_bytes: int
    output: torch.Tensor  # on the meta device: shape and dtype alone


def measure_blocks(blocks: dict[str, nn.Module], x: torch.Tensor, rounds: int = 5) -> dict[str, BlockCost]:
    """Run forward and backward of each block for the micro-batch `x`, which the first block takes, on its device.

    The time is the shortest of `rounds`, after one to warm up. On copies, one on the device at a time: the blocks keep
    their statistics and gradients, and the whole model need not fit. A collective: all processes measure at the same
    time, as they will work, and get the mean, so that all of them cut at the same place.
    """
    costs = {}
    for name, original in blocks.items():
        block = copy.deepcopy(original).to(x.device).train()
        x = x.detach().requires_grad_(x.is_floating_point())
        kept = {}  # by address: two operations may keep one tensor

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = block(x)
        keep(y)  # for the block behind it, or to be sent
        for known in (x, *block.parameters()):
            kept.pop(known.untyped_storage().data_ptr(), None)
        activation_bytes = sum(storage.nbytes() for storage in kept.values())
        times = []
        for _ in range(rounds + 1):
            synchronize(x.device)
            began = time.perf_counter()
            y = block(x)
            torch.autograd.backward(y, torch.ones_like(y))
            synchronize(x.device)
            times.append(time.perf_counter() - began)
        sizes = [(p.numel(), p.numel() * p.element_size()) for p in block.parameters()]
        parameters, parameter_bytes = map(sum, zip(*sizes, strict=True))
        output = torch.empty_like(y, device="meta")
        time_s = statistics.mean(gather_object([min(times[1:])]))
        costs[name] = BlockCost(time_s, activation_bytes, parameters, parameter_bytes, output)
        x = y
    return costs


def even_cut(num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Where to cut blocks 0 .. num_blocks - 1 so that the dearest of `num_stages` stages is as cheap as possible.

    cost(stage, first, last): of blocks first .. last - 1 as stage number `stage`. Returns num_stages + 1 boundaries,
    from 0 to num_blocks; no stage is empty. Dynamic programming: best[last] is the best way to cut the blocks before
    `last` into the stages so far.
    """
    best = {0: (0.0, [0])}
    for stage in range(num_stages):
        best = {
            last: min(
                (max(dearest, cost(stage, first, last)), [*bounds, last])
                for first, (dearest, bounds) in best.items()
                if first < last
            )
            for last in range(stage + 1, num_blocks - (num_stages - stage - 1) + 1)
        }
    return best[num_blocks][1]


def cut_evenly(
    costs: dict[str, BlockCost], num_stages: int, balance: str, schedule: str, num_microbatches: int
) -> list[list[str]]:
    """The names of each stage's blocks. balance: "time", or "memory" for weights, optimizer state and activations."""
    names, costs = list(costs), list(costs.values())

    def time_s(_, first, last):
        return sum(cost.time_s for cost in costs[first:last])

    def memory_bytes(stage, first, last):
        # A weight has a gradient and AdamW's two moments; activations stay until the micro-batch comes back.
        waiting = {"naive": 1, "gpipe": num_microbatches, "1f1b": num_stages - stage}.get(schedule, num_stages)
        kept = min(waiting, num_microbatches)
        return sum(4 * cost.parameter_bytes + kept * cost.activation_bytes for cost in costs[first:last])

    bounds = even_cut(len(names), num_stages, time_s if balance == "time" else memory_bytes)
    return [names[first:last] for first, last in itertools.pairwise(bounds)]


def stage_table(stages: list[list[str]], costs: dict[str, BlockCost]) -> list[dict]:
    """One row a stage, for the screen and run.json; times and activations are those of one micro-batch."""
    rows, total_s = [], sum(cost.time_s for cost in costs.values())
    for index, names in enumerate(stages):
        own = [costs[name] for name in names]
        time_s = sum(cost.time_s for cost in own)
        rows.append(
            {
                "stage": index,
                "blocks": names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
                "parameters": sum(cost.parameters for cost in own),
                "time_ms": round(1000 * time_s, 2),
                "time_share": round(time_s / total_s, 4),
                "activations_mib": round(sum(cost.activation_bytes for cost in own) / 2**20, 2),
            }
        )
    return rows


def as_text(rows: list[dict]) -> str:
    """A table with aligned columns."""
    texts = [list(rows[0]), *([f"{cell:,}" if cell != str(cell) else cell for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(f"{word:>{width}}" for word, width in zip(text, widths, strict=True)) for text in texts)


class OneProcess:
    """Stages on the devices of this process. Kernels run asynchronously: each device works off its own queue."""

    def __init__(self, stages: dict[int, nn.Module], places: list[tuple[int, torch.device]], schedule: str):
        """places: for each stage the line it has in the timeline, and its device."""
        self.stages, self.places = stages, places
        self.timeline = Timeline({device for _, device in places})
        # Micro-batches between their forward and their backward pass.
        self.most_running = {"naive": 1, "gpipe": sys.maxsize}.get(schedule, len({row for row, _ in places}))

    def run(self, batches, loss_fn):
        """Forward and, where gradients are enabled, backward of each micro-batch. loss_fn(logits, batch): a scalar."""
        running = deque()
        for number, batch in enumerate(batches):
            if len(batch.labels):
                running.append((number, self.forward(number, batch, loss_fn)))
            if not torch.is_grad_enabled():
                running.clear()
            if len(running) == self.most_running:
                self.backward(*running.popleft())
        while running:
            self.backward(*running.popleft())

    def forward(self, number, batch, loss_fn):
        x, ends = batch.images, []
        for (index, stage), (row, device) in zip(self.stages.items(), self.places, strict=True):
            x = x.detach().to(device, non_blocking=True).requires_grad_(x.is_floating_point())
            with self.timeline.span(row, index, "forward", number, device):
                y = stage(x)
                if index == len(self.stages) - 1:
                    y = loss_fn(y, batch)
            ends.append((x, y))
            x = y
        return ends

    def backward(self, number, ends):
        gradient = None
        for index, (row, device) in reversed(list(enumerate(self.places))):
            x, y = ends.pop()
            with self.timeline.span(row, index, "backward", number, device):
                y.backward(None if gradient is None else gradient.to(device, non_blocking=True))
            gradient = x.grad


class TimedStage(PipelineStage):
    """A PipelineStage that writes down when it works; waiting for what it needs from other stages is not in it."""

    timeline = row = None

    def forward_one_chunk(self, number, *args, **kwargs):
        with self.timeline.span(self.row, self.stage_index, "forward", number, self.device):
            return super().forward_one_chunk(number, *args, **kwargs)

    def backward_one_chunk(self, number, *args, **kwargs):
        with self.timeline.span(self.row, self.stage_index, "backward", number, self.device):
            return super().backward_one_chunk(number, *args, **kwargs)


class OverProcesses:
    """This process's stages of a pipeline over the processes of `group`, in one of torch's schedules."""

    def __init__(self, stages: dict[int, nn.Module], ends: list[torch.Tensor], schedule, group, device, row):
        """ends: what goes into the first stage and comes out of each, for a micro-batch; on the meta device."""
        self.stages, self.ends, self.schedule, self.group, self.device = stages, ends, schedule, group, device
        self.row, self.timeline, self.made = row, Timeline({device}), {}

    def run(self, batches, loss_fn):
        """As OneProcess.run; each process of the pipeline has the same batches, and the last stage calls loss_fn."""
        self.loss_fn = loss_fn
        for size, same_size in itertools.groupby(batches, lambda batch: len(batch.labels)):
            same_size = list(same_size) if size else []  # what is left at the end of an epoch may be fewer than pieces
            # Interleaved wants a multiple of the processes, or fewer than these.
            rest = len(same_size) % self.group.size() if self.schedule == "interleaved" else 0
            at_once = 1 if self.schedule == "naive" else max(len(same_size) - rest, rest, 1)
            for start in range(0, len(same_size), at_once):
                self.fill_and_drain(size, same_size[start : start + at_once])

    def fill_and_drain(self, size, batches):
        key = size, len(batches), torch.is_grad_enabled()
        if key not in self.made:
            self.made[key] = self.make_schedule(*key)
        step = self.made[key].step if torch.is_grad_enabled() else self.made[key].eval
        # Not the labels but the whole batches as targets: loss_fn needs its other fields. The first stage takes the
        # images, the last one the targets.
        step(arg_mbs=[(batch.images,) for batch in batches], target_mbs=batches)

    def make_schedule(self, size, count, training):
        # Shapes are told and not tried out: torch would do that with a forward and a backward pass.
        ends = [torch.empty(size, *end.shape[1:], dtype=end.dtype, device="meta") for end in self.ends]
        stages = []
        for index, stage in self.stages.items():
            x, y = (end.requires_grad_(training and end.is_floating_point()) for end in ends[index : index + 2])
            stages.append(TimedStage(stage, index, len(ends) - 1, self.device, x, y, group=self.group))
            stages[-1].timeline, stages[-1].row = self.timeline, self.row
        # scale_grads would divide by the number of micro-batches; loss_fn divides by the samples of the update.
        options = {"loss_fn": lambda logits, batch: self.loss_fn(logits, batch), "scale_grads": False}
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, **options)
        # 1F1B refuses fewer micro-batches than stages; with so few it would run them as GPipe does anyway.
        one_f_one_b = self.schedule == "1f1b" and training and count >= len(ends) - 1
        return (Schedule1F1B if one_f_one_b else ScheduleGPipe)(stages[0], count, **options)


def sum_over_copies(model, group) -> None:
    """Add up the gradients of this part of the model over its copies, and take the mean of BatchNorm's statistics.

    By hand and in one message, not by DDP: it fails under GPipe and Interleaved. Their losses are already divided by
    the samples of the whole update.
    """
    for parameter in model.parameters():
        if parameter.grad is None:  # at the end of an epoch there may be no sample left for this copy
            parameter.grad = torch.zeros_like(parameter)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    tensors = [*(parameter.grad for parameter in model.parameters()), *(b.div_(group.size()) for b in buffers)]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timeline:
    """When each stage of this process ran forward and backward, in the updates that are recorded.

    On GPUs by events in the stream, which hold nothing up; on a CPU by its clock. Zero is the moment of `begin`, of
    which the caller sees to it that it is the same in all processes: clocks of two machines are not compared.
    """

    def __init__(self, devices: set[torch.device]):
        self.devices, self.recording, self.updates = devices, False, []

    def begin(self) -> None:
        for device in self.devices:
            synchronize(device)
        self.zero = {device: self._mark(device) for device in self.devices}
        self.spans, self.recording = [], True

    def end(self) -> None:
        """Add the update to `updates`, as a list of (row, stage, kind, micro-batch, began s, ended s)."""
        for device in self.devices:
            synchronize(device)
        self.updates.append(
            [(*what, self._seconds(device, a), self._seconds(device, b)) for device, *what, a, b in self.spans]
        )
        self.recording = False

    @contextlib.contextmanager
    def span(self, row: int, stage: int, kind: str, micro_batch: int, device: torch.device):
        """kind: "forward" or "backward"; row: the process or device that is busy."""
        if not self.recording:
            yield
            return
        began = self._mark(device)
        yield
        self.spans.append((device, row, stage, kind, micro_batch, began, self._mark(device)))

    def report(self, accelerator: Accelerator, title: str, picture: Path) -> list[float]:
        """The idle share of each row, the median over the updates; draws one of these. A collective."""
        updates = [list(itertools.chain(*own)) for own in zip(*gather_object([self.updates]), strict=True)]
        if accelerator.is_main_process:
            plot_timeline(updates[len(updates) // 2], title, picture)
        shares = [idle_shares(spans) for spans in updates]
        rows = sorted(set().union(*shares))  # in an update of few samples, one may have nothing to do
        return [round(statistics.median(share.get(row, 1.0) for share in shares), 4) for row in rows]

    def _mark(self, device):
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _seconds(self, device, mark) -> float:
        zero = self.zero[device]
        return mark - zero if device.type != "cuda" else zero.elapsed_time(mark) / 1000


def idle_shares(spans: list[tuple]) -> dict[int, float]:
    """Of the time from the first begin to the last end in one update of all processes, what each row did not use."""
    length = max(span[5] for span in spans) - min(span[4] for span in spans)
    busy = {}
    for row, _, _, _, began, ended in spans:
        busy[row] = busy.get(row, 0.0) + ended - began
    return {row: 1 - busy[row] / length for row in sorted(busy)}


def plot_timeline(spans: list[tuple], title: str, picture: Path) -> None:
    """Bars of one update: a line for each row, forward and backward in two colours, with the micro-batch's number."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen and a font cache of its own
    from matplotlib.patches import Patch

    rows = sorted({span[0] for span in spans})
    stages = {row: sorted({span[1] for span in spans if span[0] == row}) for row in rows}
    idle, start = idle_shares(spans), min(span[4] for span in spans)
    figure = Figure(figsize=(12, 1.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shades = {"forward": ("#4c78a8", "#9ecae9"), "backward": ("#f58518", "#ffbf79")}  # the second: a later stage's
    for row, stage, kind, micro_batch, began, ended in spans:
        left, width, place = 1000 * (began - start), 1000 * (ended - began), rows.index(row)
        colour = shades[kind][stages[row].index(stage) % 2]
        axes.barh(place, width, left=left, color=colour, edgecolor="white", linewidth=0.5, height=0.8)
        axes.text(left + width / 2, place, str(micro_batch), ha="center", va="center", fontsize=7, clip_on=True)
    labels = [f"{row}: stage {', '.join(map(str, stages[row]))}\nidle {idle[row]:.0%}" for row in rows]
    axes.set(yticks=range(len(rows)), yticklabels=labels, xlabel="ms", title=title)
    axes.invert_yaxis()
    figure.legend(handles=[Patch(color=shades[kind][0], label=kind) for kind in shades], loc="outside right upper")
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        stop(f"{picture} cannot be written: {error.strerror or error}")
