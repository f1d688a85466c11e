"""Pipeline parallelism: split a sequence of blocks into stages of similar cost, and run them."""

import copy
import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pandas
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply, send_to_device
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ..checkpoint.folder import copy_to_cpu


class BlockCost(NamedTuple):
    """The cost of one block for one micro-batch."""

    time_s: float  # forward and backward pass
    activation_bytes: int  # saved for the backward pass, without the input of the block
    parameters: int
    parameter_bytes: int
    output: torch.Tensor  # on the meta device, for its shape and dtype


class ModelParts(NamedTuple):
    """Describes a model that is split over processes, for `run.start`."""

    copy: int  # index of the copy of the model to which this process's part belongs
    batch: str  # how the global batch is split, for the banner
    notes: dict  # facts about this launch, for run.json
    group: distributed.ProcessGroup | None  # the processes of this copy; None: this process has the whole model

    def join(self, accelerator: Accelerator, entries: dict, copies: dict) -> dict:
        """Merge the entries of all processes that share copy 0 of the model, on the main process. Collective.

        Tensors are sent one by one: gather_object would hold several models in the main process's memory, with NCCL on
        its GPU.

        Args:
            entries: tensors, JSON, or nested dicts of them by name. If several processes have an entry, the main
                process's is used.
            copies: nested like `entries`. Received tensors are put here, into the memory of earlier ones.
        """

        def send(tensor):
            distributed.send(tensor.to(accelerator.device).contiguous(), group=self.group, group_dst=0)

        own = entries if self.copy == 0 else {}
        for rank, others in enumerate(gather_object([send_to_device(own, "meta")])):
            if rank == accelerator.process_index > 0:
                recursively_apply(send, own)
            elif rank > 0 and accelerator.is_main_process:
                entries = self._receive(rank, entries, others, copies, accelerator.device)
        return entries

    def _receive(self, rank: int, entries: dict, others: dict, copies: dict, device: torch.device) -> dict:
        """`entries`, and those of another rank: JSON, and tensors on the meta device in the order they are sent."""
        merged = {**others, **entries}
        for name, other in others.items():
            if isinstance(other, dict):
                more = entries.get(name, {}), other, copies.setdefault(name, {})
                merged[name] = self._receive(rank, *more, device)
            elif isinstance(other, torch.Tensor):
                copies |= copy_to_cpu({name: other}, copies)
                tensor = copies[name].to(device)  # NCCL receives on a GPU
                distributed.recv(tensor, group=self.group, group_src=rank)
                merged[name] = entries.get(name, copies[name].copy_(tensor))
        return merged


def measure_blocks(blocks: dict[str, nn.Module], x: torch.Tensor, rounds: int = 5) -> dict[str, BlockCost]:
    """Measure the forward and backward pass of each block for one micro-batch. Collective.

    All ranks measure at the same time, as loaded as they will be in training, and return the mean of their times, so
    that all choose the same split. One block at a time is copied to the device of `x`: the whole model need not fit
    there, and its gradients and BatchNorm statistics do not change.

    Args:
        blocks: by name, in the order in which the model runs them.
        x: the input of the first block, a micro-batch.
        rounds: number of passes, of which the fastest counts, after one for warm-up.
    """
    costs, synchronize = {}, torch.get_device_module(x.device).synchronize
    for name, original in blocks.items():
        block = copy.deepcopy(original).to(x.device).train()
        x = x.detach().requires_grad_(x.is_floating_point())
        activation_bytes = measure_activations(block, x)
        times = []
        for _ in range(rounds + 1):
            synchronize()
            start = time.perf_counter()
            y = block(x)
            torch.autograd.backward(y, torch.ones_like(y))
            synchronize()
            times.append(time.perf_counter() - start)
        parameters = list(block.parameters())
        costs[name] = BlockCost(
            time_s=statistics.mean(gather_object([min(times[1:])])),
            activation_bytes=activation_bytes,
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            output=torch.empty_like(y, device="meta"),
        )
        x = y
    return costs


def measure_activations(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a block saves for its backward pass, including its output but not its input."""
    # By address, because several operations may save the same tensor.
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = block(x)
    keep(y)  # the next block needs it, or it is sent to the next stage
    for tensor in (x, *block.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in kept.values())


def balanced_boundaries(num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """Split `num_blocks` blocks so that the most expensive stage is as cheap as possible; no stage is empty.

    By dynamic programming: best[last] is the best split of the blocks before `last` into the stages so far, as the cost
    of its most expensive stage and its boundaries.

    Args:
        cost: cost(stage, first, last) is the cost of blocks first to last - 1 as stage number `stage`.

    Returns:
        num_stages + 1 boundaries: stage i has blocks boundaries[i] to boundaries[i + 1] - 1.
    """
    best = {0: (0.0, [0])}
    for stage in range(num_stages):
        stages_after = num_stages - stage - 1
        longer = {}
        for last in range(stage + 1, num_blocks - stages_after + 1):
            longer[last] = min(
                (max(most_expensive, cost(stage, first, last)), [*boundaries, last])
                for first, (most_expensive, boundaries) in best.items()
                if first < last
            )
        best = longer
    _, boundaries = best[num_blocks]
    return boundaries


def balance_stages(
    costs: dict[str, BlockCost], num_stages: int, balance: str, schedule: str, num_microbatches: int
) -> list[list[str]]:
    """The names of the blocks of each stage.

    Args:
        balance: "time", or "memory" (of weights, gradients, optimizer state and activations).
    """
    names = list(costs)
    costs = list(costs.values())

    def time_s(_, first, last):
        return sum(cost.time_s for cost in costs[first:last])

    def memory_bytes(stage, first, last):
        # The number of micro-batches between their forward and backward pass in this stage.
        in_flight = {"naive": 1, "gpipe": num_microbatches, "1f1b": num_stages - stage}
        in_flight = min(in_flight.get(schedule, num_stages), num_microbatches)
        # A weight has a gradient and two moments of AdamW.
        return sum(4 * cost.parameter_bytes + in_flight * cost.activation_bytes for cost in costs[first:last])

    cost = time_s if balance == "time" else memory_bytes
    boundaries = balanced_boundaries(len(names), num_stages, cost)
    return [names[first:last] for first, last in itertools.pairwise(boundaries)]


def stage_table(stages: list[list[str]], costs: dict[str, BlockCost]) -> list[dict]:
    """One row per stage, for the screen and run.json. Times and activations are for one micro-batch."""
    total_s = sum(cost.time_s for cost in costs.values())
    rows = []
    for index, names in enumerate(stages):
        stage_costs = [costs[name] for name in names]
        time_s = sum(cost.time_s for cost in stage_costs)
        activation_bytes = sum(cost.activation_bytes for cost in stage_costs)
        row = {
            "stage": index,
            "blocks": names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
            "parameters": sum(cost.parameters for cost in stage_costs),
            "time_ms": round(1000 * time_s, 2),
            "time_share": round(time_s / total_s, 4),
            "activations_mib": round(activation_bytes / 2**20, 2),
        }
        rows.append(row)
    return rows


def format_table(rows: list[dict]) -> str:
    cells = pandas.DataFrame(rows).map(lambda cell: cell if isinstance(cell, str) else f"{cell:,}")
    return cells.to_string(index=False)


@dataclasses.dataclass
class OneProcess:
    """A pipeline with all stages in this process, on one or several devices, each of which runs asynchronously."""

    stages: list[nn.Module]
    devices: list[torch.device]  # one per stage
    max_in_flight: int  # the maximum number of micro-batches between their forward and backward pass
    group = None  # of processes

    def run(self, inputs: list[torch.Tensor], targets: list, loss_fn: Callable) -> None:
        """Run the forward pass of each micro-batch and, if gradients are enabled, the backward pass.

        Args:
            inputs: a tensor (n, ...) per micro-batch; n may differ.
            targets: one per micro-batch, of any type.
            loss_fn: loss_fn(output, target) returns a scalar, such as `batch.mean_loss(losses)`. The gradients of all
                micro-batches are summed.
        """
        in_flight = deque()
        for x, target in zip(inputs, targets, strict=True):
            tensors = self.forward(x, target, loss_fn)
            if torch.is_grad_enabled():
                in_flight.append(tensors)
            if len(in_flight) == self.max_in_flight:
                self.backward(in_flight.popleft())
        while in_flight:
            self.backward(in_flight.popleft())

    def forward(self, x: torch.Tensor, target, loss_fn: Callable) -> list[tuple]:
        """The inputs and outputs of all stages; the last output is the loss."""
        tensors = []
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = x.detach().to(device, non_blocking=True).requires_grad_(x.is_floating_point())
            y = stage(x)
            if stage is self.stages[-1]:
                y = loss_fn(y, target)
            tensors.append((x, y))
            x = y
        return tensors

    def backward(self, tensors: list[tuple]) -> None:
        gradient = None
        while tensors:  # popped, to free them as soon as possible
            x, y = tensors.pop()
            y.backward(None if gradient is None else gradient.to(y.device, non_blocking=True))
            gradient = x.grad


@dataclasses.dataclass
class OverProcesses:
    """This process's stages of a pipeline over several processes, with one of torch's schedules."""

    stages: dict[int, nn.Module]  # by their index in the model
    examples: list[torch.Tensor]  # the input of the first stage and the outputs of all stages, on the meta device
    schedule: str
    group: distributed.ProcessGroup  # the processes of this pipeline
    device: torch.device
    schedules: dict = dataclasses.field(default_factory=dict)  # by the sizes that they were made for

    def run(self, inputs: list[torch.Tensor], targets: list, loss_fn: Callable) -> None:
        """As OneProcess.run. Collective over the processes of the pipeline.

        Only the first stage uses the inputs' content, but all need their lengths; only the last one calls loss_fn.
        """
        self.loss_fn = loss_fn
        # torch's schedules need micro-batches of equal size, so the pipeline is filled once per size.
        micro_batches = zip(inputs, targets, strict=True)
        for size, same_size in itertools.groupby(micro_batches, lambda pair: len(pair[0])):
            same_size = list(same_size)
            at_once = self._micro_batches_at_once(len(same_size))
            for start in range(0, len(same_size), at_once):
                self._fill_and_drain(size, same_size[start : start + at_once])

    def _micro_batches_at_once(self, count: int) -> int:
        if self.schedule == "naive":
            return 1
        processes = self.group.size()
        if self.schedule == "interleaved" and count > processes:
            # It needs a multiple of the number of processes, or fewer micro-batches than processes.
            return count - count % processes
        return count

    def _fill_and_drain(self, size: int, micro_batches: list[tuple]) -> None:
        training = torch.is_grad_enabled()
        key = size, len(micro_batches), training
        if key not in self.schedules:
            self.schedules[key] = self._make_schedule(*key)
        step = self.schedules[key].step if training else self.schedules[key].eval
        step(arg_mbs=[(x,) for x, _ in micro_batches], target_mbs=[target for _, target in micro_batches])

    def _make_schedule(self, size: int, count: int, training: bool):
        # Given the shapes, torch need not run a forward and a backward pass to infer them.
        examples = [example.new_empty((size, *example.shape[1:])) for example in self.examples]
        num_stages = len(examples) - 1
        stages = []
        for index, module in self.stages.items():
            x, y = examples[index], examples[index + 1]
            x.requires_grad_(training and x.is_floating_point())
            y.requires_grad_(training and y.is_floating_point())
            stages.append(PipelineStage(module, index, num_stages, self.device, x, y, group=self.group))
        options = {
            "loss_fn": lambda output, target: self.loss_fn(output, target),
            "scale_grads": False,  # True divides by the number of micro-batches; loss_fn divides by the samples
        }
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, **options)
        # 1F1B refuses fewer micro-batches than stages, for which it would equal GPipe.
        if self.schedule == "1f1b" and training and count >= num_stages:
            return Schedule1F1B(stages[0], count, **options)
        return ScheduleGPipe(stages[0], count, **options)


def sum_over_copies(model: nn.Module, group) -> None:
    """Sum the gradients over the copies of this part of the model, and average BatchNorm's buffers. Collective.

    DDP does not work with GPipe and the interleaved schedule.
    """
    if group is None:  # there is only one copy
        return
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = gradients + [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat, group=group)
    flat[sum(gradient.numel() for gradient in gradients) :].div_(group.size())
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])
