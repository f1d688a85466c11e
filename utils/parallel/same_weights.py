"""Checks that all processes have the same weights (before a checkpoint) and the same test result (after a test).

DDP averages the gradients of the parameters that required them when it was created. If a layer is unfrozen later, a
script calls `loss.backward()` directly, or one rank changes a weight, the models drift apart without an error. A test
result that differs covers only the process's own samples.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.state import plain_name
from ..console import stop
from ..sampler import virtual_processes

AVERAGE_BUFFERS = "for BatchNorm, use BatchNorms from utils/parallel/batch_norm.py, as in resnet50.py"


def check(accelerator: Accelerator, models: dict[str, nn.Module]) -> None:
    """Stop if parameters or buffers of models from `prepare`, except sharded ones, differ. Collective.

    What is compared is the sum of their bits as integers, because a floating-point sum depends on the order of
    additions, which differs between devices. Without virtual processes, buffers that DDP broadcasts may differ: the
    next forward pass begins with those of rank 0, which are saved. Others would stay different until a resume.
    """
    tensors = {}
    for owner, model in models.items():
        ddp = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        broadcast = {buffer for part in ddp if part.forward_sync_buffers for buffer in part.buffers()}
        if virtual_processes(accelerator):  # no forward pass changes them
            broadcast.clear()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and tensor not in broadcast and not hasattr(tensor, "full_tensor"):
                tensors[f"{owner}.{plain_name(name).removeprefix('module.')}"] = tensor
    if not tensors:
        return
    sums = torch.stack([sum_of_bits(tensor).to(accelerator.device) for tensor in tensors.values()])
    first, *others = accelerator.gather(sums[None]).tolist()
    for rank, sums_of_rank in enumerate(others, 1):
        for name, value, other in zip(tensors, first, sums_of_rank, strict=True):
            if value != other:
                advice = f"this buffer depends on the process's own samples: {AVERAGE_BUFFERS}"
                if isinstance(tensors[name], nn.Parameter):
                    advice = (
                        "DDP averages gradients only in accelerator.backward, and only of parameters that had "
                        "requires_grad when prepare() was called: unfreeze layers before prepare(), and call no other "
                        "backward"
                    )
                stop(f"the processes have different weights: {name} differs between rank 0 and rank {rank}. {advice}")


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's values, each reinterpreted as an integer of the same size; int64, ()."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64)


def same_result(numbers: dict[str, float]) -> dict[str, float]:
    """Return rank 0's numbers of a test on every rank: all save the same best model, and stop together. Collective.

    Stops at results that differ by more than rounding, which machines of two kinds have: they are of a process's own
    samples.
    """
    results = gather_object([numbers])
    first = results[0]
    for rank, result in enumerate(results):
        for name in sorted(first.keys() | result.keys()):
            value, other = first.get(name), result.get(name)
            if not is_close(value, other):
                stop(
                    f"the processes have different test results: {name} is {other} on rank {rank}, and {value} on rank "
                    "0; use run.new_metrics(), or add up the parts of all processes with accelerator.reduce"
                )
    return first


def is_close(value: float | None, other: float | None) -> bool:
    """Whether two numbers, or two missing ones, differ by no more than rounding."""
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(value) and math.isnan(other))
