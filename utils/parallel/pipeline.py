"""Pipeline parallelism: split a sequence of blocks into stages of similar cost, and run them."""

import copy
import dataclasses
import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


class BlockCost(NamedTuple):
    """The cost of one block for one micro-batch."""

    time_s: float  # forward and backward pass
    parameters: int
    output: torch.Tensor  # on the meta device, for its shape and dtype


class ModelParts(NamedTuple):
    """Describes a model that is split over processes, for `run.start`."""

    batch: str  # how the global batch is split, for the banner
    notes: dict  # entries of run.json about this launch


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
        times = []
        for _ in range(rounds + 1):
            synchronize()
            start = time.perf_counter()
            y = block(x)
            torch.autograd.backward(y, torch.ones_like(y))
            synchronize()
            times.append(time.perf_counter() - start)
        costs[name] = BlockCost(
            time_s=statistics.mean(gather_object([min(times[1:])])),
            parameters=sum(parameter.numel() for parameter in block.parameters()),
            output=torch.empty_like(y, device="meta"),
        )
        x = y
    return costs


def balance_stages(costs: dict[str, BlockCost], num_stages: int) -> list[list[str]]:
    """Split blocks so that the slowest stage is as fast as possible; no stage is empty.

    Args:
        costs: by block, in the order in which the model runs them.

    Returns:
        The names of the blocks of each stage.
    """
    names, seconds = list(costs), [cost.time_s for cost in costs.values()]

    @functools.cache
    def split(last: int, stages: int) -> tuple[float, list[int]]:
        """The best split of the blocks before `last`: the time of its slowest stage, and its boundaries."""
        if stages == 1:
            return sum(seconds[:last]), [0, last]
        earlier = ((first, *split(first, stages - 1)) for first in range(stages - 1, last))
        return min((max(slowest, sum(seconds[first:last])), [*ends, last]) for first, slowest, ends in earlier)

    _, boundaries = split(len(names), num_stages)
    return [names[first:last] for first, last in itertools.pairwise(boundaries)]


def stage_table(stages: list[list[str]], costs: dict[str, BlockCost]) -> list[dict]:
    """One row per stage, for the screen and run.json. Times are for one micro-batch."""
    times = [sum(costs[name].time_s for name in names) for names in stages]
    return [
        {
            "stage": index,
            "blocks": names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
            "parameters": sum(costs[name].parameters for name in names),
            "time_ms": round(1000 * time_s, 2),
            "time_share": round(time_s / sum(times), 4),
        }
        for index, (names, time_s) in enumerate(zip(stages, times, strict=True))
    ]


@dataclasses.dataclass
class OneProcess:
    """A pipeline with all stages in this process, on one or several devices, each of which runs asynchronously."""

    stages: list[nn.Module]
    devices: list[torch.device]  # one per stage
    max_in_flight: int  # the maximum number of micro-batches between their forward and backward pass
    group = None  # of processes

    def run(self, inputs: list[torch.Tensor], targets: Iterable, loss_fn: Callable) -> None:
        """Run the forward pass of each micro-batch and, if gradients are enabled, the backward pass.

        Args:
            inputs: a tensor (n, ...) per micro-batch; n may differ.
            targets: one per micro-batch, of any type; an iterator is asked before each forward pass.
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
    """This process's stage of a pipeline over several processes, with one of torch's schedules."""

    stage: nn.Module
    index: int  # of the stage in the model
    examples: list[torch.Tensor]  # the input of the first stage and the outputs of all stages, on the meta device
    schedule: str
    group: distributed.ProcessGroup  # the processes of this pipeline
    device: torch.device
    schedules: dict = dataclasses.field(default_factory=dict)  # by the sizes that they were made for

    def run(self, inputs: list[torch.Tensor], targets: Iterable, loss_fn: Callable) -> None:
        """As OneProcess.run. Collective over the processes of the pipeline.

        Only the first stage uses the inputs' content, but all need their lengths; only the last one calls loss_fn.
        """
        self.loss_fn, waiting = loss_fn, iter(targets)
        # torch runs the micro-batches in order.
        hook = self.stage.register_forward_pre_hook(lambda *_: self.targets.append(next(waiting)))
        # torch's schedules need micro-batches of equal size, so the pipeline is filled once per size.
        for size, same_size in itertools.groupby(inputs, len):
            same_size = list(same_size)
            at_once = 1 if self.schedule == "naive" else len(same_size)
            for start in range(0, len(same_size), at_once):
                self._fill_and_drain(size, same_size[start : start + at_once])
        hook.remove()
        next(waiting, None)  # `targets` may have something to do after the last one

    def _fill_and_drain(self, size: int, inputs: list[torch.Tensor]) -> None:
        training = torch.is_grad_enabled()
        key = size, len(inputs), training
        if key not in self.schedules:
            self.schedules[key] = self._make_schedule(*key)
        self.targets = []
        step = self.schedules[key].step if training else self.schedules[key].eval
        # torch cuts tensors into the micro-batches; targets may be of any type, so it gets their numbers.
        step(torch.cat(inputs), target=torch.arange(len(inputs)))

    def _make_schedule(self, size: int, count: int, training: bool):
        # Given the shapes, torch need not run a forward and a backward pass to infer them.
        examples = [example.new_empty((size, *example.shape[1:])) for example in self.examples]
        num_stages = len(examples) - 1
        x, y = examples[self.index : self.index + 2]
        for example in (x, y):
            example.requires_grad_(training and example.is_floating_point())
        stage = PipelineStage(self.stage, self.index, num_stages, self.device, x, y, group=self.group)
        # 1F1B refuses fewer micro-batches than stages, for which it would equal GPipe.
        kind = Schedule1F1B if self.schedule == "1f1b" and training and count >= num_stages else ScheduleGPipe
        # scale_grads would divide by the number of micro-batches; loss_fn divides by the samples.
        return kind(stage, count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(output, self.targets[number])


def sum_over_replicas(model: nn.Module, group) -> None:
    """Sum the gradients over the replicas of this part of the model, and average BatchNorm's buffers. Collective.

    DDP does not work with GPipe.
    """
    if group is None:  # there is only one replica
        return
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = gradients + [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat, group=group)
    flat[sum(gradient.numel() for gradient in gradients) :].div_(group.size())
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for tensor, part in zip(tensors, parts, strict=True)])
