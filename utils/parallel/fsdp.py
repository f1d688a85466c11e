"""FSDP2 (fsdp.yaml): making and averaging models with sharded parameters; checkpoint/state.py saves them."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import nn


def memory_format(accelerator: Accelerator) -> torch.memory_format:
    """The memory format for the weights of an image model: channels_last, except under FSDP.

    FSDP accepts only contiguous parameters; convolutions convert them for channels_last images.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        return torch.contiguous_format
    return torch.channels_last


def supports_fused_step(accelerator: Accelerator) -> bool:
    """Whether SGD can use fused=True: in torch 2.15 not for sharded parameters, unlike AdamW."""
    return accelerator.distributed_type != DistributedType.FSDP


def shard(model: nn.Module, accelerator: Accelerator) -> None:
    """Under FSDP, shard a model that has no optimizer: a moving average.

    A sharded model cannot be copied. Create the AveragedModel of the unsharded model, and call `shard(average.module,
    accelerator)` after `prepare`.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp2_prepare_model(accelerator, model)
        # Also the outermost module: it would otherwise stay unsharded after a test, and the next step of the average
        # would update a copy that is thrown away.
        model.set_reshard_after_forward(True)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average = decay x average + (1 - decay) x model, on each process for its own shards; integers are copied.

    AveragedModel.update_parameters waits for the GPU, and takes four operations for each of BatchNorm's counts.
    """
    by_type = {}
    for pair in zip(*([*part.parameters(), *part.buffers()] for part in (average, model)), strict=True):
        # Not as DTensors: a model also has plain buffers, and torch does not accept mixed lists.
        shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in pair]
        by_type.setdefault(shards[0].dtype, []).append(shards)
    for dtype, pairs in by_type.items():
        averages, values = zip(*pairs, strict=True)
        if decay and dtype.is_floating_point:
            torch._foreach_lerp_(averages, values, 1 - decay)
        else:
            torch._foreach_copy_(averages, values)
