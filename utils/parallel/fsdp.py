"""FSDP2 (fsdp.yaml): making and averaging models with sharded parameters; checkpoint/state.py saves them."""

from collections.abc import Callable

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

    A sharded model cannot be copied. Create the AveragedModel of the unsharded model, with `moving_average`, and call
    `shard(average.module, accelerator)` after `prepare`.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp2_prepare_model(accelerator, model)
        # Also the outermost module: it would otherwise stay unsharded after a test, and the next step of the average
        # would update a copy that is thrown away.
        model.set_reshard_after_forward(True)


def moving_average(decay: float) -> Callable:
    """As torch's get_ema_multi_avg_fn, but each process averages its own shards of a sharded model."""

    @torch.no_grad()
    def average(averaged, current, num_averaged):
        # Not as DTensors: a model also has plain buffers, and torch does not accept mixed lists.
        averaged, current = (list(map(local_shard, tensors)) for tensors in (averaged, current))
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - decay)
        else:  # BatchNorm's counts, which torch would average one by one, in four operations each
            torch._foreach_copy_(averaged, current)

    return average


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor, without a copy; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
