"""FSDP2 (fsdp.yaml): saving, loading and averaging models with sharded parameters."""

from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def whole_model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded state of a model, on the main process only. Collective."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=whole_tensors())


def load_whole_model(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load what `whole_model_state` returned. Collective."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, state, options=whole_tensors())


def whole_optimizer_state(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The unsharded state of each parameter by name, on the main process only. Collective."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model_of(optimizer, models), optimizer, options=whole_tensors()).get("state", {})


def load_whole_optimizer(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load what `whole_optimizer_state` returned. Collective."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    if not state:  # SGD without momentum
        return
    model = model_of(optimizer, models)
    # Without options: with them, only rank 0 would get the names of the parameters.
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=whole_tensors())


def model_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module:
    """The model whose parameters the optimizer trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next(model for model in models if any(id(parameter) in trained for parameter in model.parameters()))


def whole_tensors():
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # takes a second to import

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


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
    average = get_ema_multi_avg_fn(decay)

    def average_shards(averaged, current, num_averaged):
        # Not as DTensors: a model also has plain buffers, and torch does not accept mixed lists.
        average(list(map(local_shard, averaged)), list(map(local_shard, current)), None)

    return average_shards


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor, without a copy; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
