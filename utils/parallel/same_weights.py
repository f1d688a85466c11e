"""Checks that all processes have the same weights, before a checkpoint.

DDP averages the gradients of the parameters that required them when it was created. If a layer is unfrozen later, a
script calls `loss.backward()` directly, or one rank changes a weight, the models drift apart without an error.
"""

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..agree import compare
from ..console import stop
from .shards import is_sharded, local_rows, plain_name

AVERAGE_BUFFERS = "for BatchNorm, use BatchNorms from utils/parallel/batch_norm.py, as in resnet50.py"


def check(accelerator: Accelerator, models: dict[str, nn.Module]) -> None:
    """Stop if parameters or buffers of models from `prepare` differ; sharded ones, between replicas. Collective.

    What is compared is the sum of their bits as integers, because a floating-point sum depends on the order of
    additions, which differs between devices. Without virtual processes, buffers that DDP broadcasts may differ: the
    next forward pass begins with those of rank 0, which are saved. Others would stay different until a resume.
    """
    tensors, has_replicas = {}, accelerator.shards < accelerator.num_processes  # with HSDP, of each shard
    for owner, model in models.items():
        ddp = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        broadcast = {buffer for part in ddp if part.broadcast_buffers for buffer in part.buffers()}
        if accelerator.virtual_processes:  # no forward pass changes them
            broadcast.clear()
        for name, tensor in model.state_dict(keep_vars=True).items():
            is_compared = tensor not in broadcast and (has_replicas or not is_sharded(tensor))
            if isinstance(tensor, torch.Tensor) and is_compared:
                tensors[f"{owner}.{plain_name(name).removeprefix('module.')}"] = tensor
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
        advice = f"this buffer depends on the process's own samples: {AVERAGE_BUFFERS}"
        if is_sharded(tensors[name]):
            advice = "HSDP copies no weights between replicas: all processes must make them from the same seed or files"
        elif isinstance(tensors[name], nn.Parameter):
            advice = (
                "DDP averages gradients only in accelerator.backward, and only of parameters that required them at "
                "prepare(): to unfreeze layers later, freeze them after prepare(), and create the accelerator with "
                "find_unused_parameters=True"
            )
        stop(f"the processes have different weights: {name} differs between rank 0 and {ranks[0]}. {advice}")


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's values, each reinterpreted as an integer of the same size; int64, ()."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64)
