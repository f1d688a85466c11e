"""Checks that all processes have the same weights, after the first step and before a checkpoint.

DDP averages the gradients of the parameters that required them when it was created. If a layer is unfrozen later, a
script calls `loss.backward()` directly, or one rank changes a weight, the models drift apart without an error.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..agree import compare
from ..console import stop
from .first_step import AVERAGE_BUFFERS, FirstStep, full_name, sum_of_bits
from .shards import is_sharded, local_rows


def check(accelerator: Accelerator, models: dict[str, nn.Module], first_step: FirstStep) -> None:
    """Stop if parameters or buffers of models from `prepare` differ; sharded ones, between replicas. Collective.

    What is compared is the sum of their bits as integers, because a floating-point sum depends on the order of
    additions, which differs between devices. Without virtual processes, buffers that DDP broadcasts may differ: the
    next forward pass begins with those of rank 0, which are saved. Others would stay different until a resume.

    Args:
        first_step: what it saw tells the cause.
    """
    tensors, has_replicas = {}, accelerator.layout.replicas > 1  # with HSDP, of each shard
    for owner, model in models.items():
        ddp = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        broadcast = {buffer for part in ddp if part.broadcast_buffers for buffer in part.buffers()}
        if accelerator.layout.virtual_processes:  # no forward pass changes them
            broadcast.clear()
        for name, tensor in model.state_dict(keep_vars=True).items():
            is_compared = tensor not in broadcast and (has_replicas or not is_sharded(tensor))
            if isinstance(tensor, torch.Tensor) and is_compared:
                tensors[full_name(owner, name)] = tensor
    if not tensors:
        return
    sums = torch.stack([sum_of_bits(local_rows(t)[0]).to(accelerator.device) for t in tensors.values()])  # copied once
    if any(map(is_sharded, tensors.values())):
        whole = sums.clone()
        distributed.all_reduce(whole, group=accelerator.mesh.get_group("shards"))
        sums = torch.where(sums.new_tensor([*map(is_sharded, tensors.values())], dtype=torch.bool), whole, sums)
    _, ranks, differing = compare(dict(zip(tensors, sums.tolist(), strict=True)))
    if differing:
        name = next(iter(differing))
        owner = next(owner for owner in models if name.startswith(f"{owner}."))
        advice = cause(name, tensors[name], models[owner], first_step, owner in first_step.called)
        stop(f"the processes have different weights: {name} differs between rank 0 and {ranks[0]}. {advice}")


def cause(name: str, tensor: torch.Tensor, model: nn.Module, first_step: FirstStep, was_called: bool) -> str:
    """Why a tensor of a model differs between processes, and what to do. Collective."""
    is_written = any(gather_object([name in first_step.written]))
    ddp = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    if not isinstance(tensor, nn.Parameter):
        return f"This buffer depends on the process's own samples: {AVERAGE_BUFFERS}"
    if is_written:
        return (
            "The forward pass writes into it, on each process for its own samples, as nn.Embedding(max_norm=...) does: "
            "write after optimizer.step() instead, for all rows, under torch.no_grad()"
        )
    if is_sharded(tensor):
        return "HSDP copies no weights between replicas: all processes must make them from the same seed or files"
    if not was_called:
        return (
            "The forward pass of the model from prepare() never ran, so DDP averages no gradients: call that model, "
            "and not its .module or accelerator.unwrap_model(...)"
        )
    if ddp and not any(tensor in part.averaged for part in ddp):
        return (
            "DDP averages only gradients of parameters that required them at prepare(): to unfreeze layers later, "
            "freeze them after prepare(), and create the accelerator with find_unused_parameters=True"
        )
    return "Gradients are averaged only in accelerator.backward, and nothing else may change a weight on one process"
