"""FSDP2 (fsdp.yaml, cpu_fsdp.yaml): making and averaging models whose parameters are sharded over the processes."""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.state import own_rows
from ..console import stop
from ..randomness import combine, generators_restored, seed_generators


def supports_fused_step(accelerator: Accelerator) -> bool:
    """Whether SGD can use fused=True: in torch 2.15 not for sharded parameters, unlike AdamW."""
    return accelerator.distributed_type != DistributedType.FSDP


def units(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """The modules that are gathered and freed on their own: entries of lists, such as blocks, and embeddings.

    Inner ones come first. Left out, and so gathered with what contains them: modules of up to `min_num_params`
    parameters, those with a parameter that others use too (tied weights), and containers without a `forward`.
    """
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    entries = {entry for parent in lists for entry in parent.children()}
    found = []
    for module in reversed(list(model.modules())):
        own = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
        is_large = sum(p.numel() for p in own) > min_num_params
        is_called = type(module).forward is not nn.Module.forward
        is_unit = is_large and is_called and (module in entries or type(module) is nn.Embedding)
        if is_unit and all(owners[p] == count for p, count in own.items()):
            found.append(module)
    return found


def shard(accelerator: Accelerator, model: nn.Module, optimizers: list[Optimizer] = ()) -> None:
    """Shard a model in place with torch's fully_shard, and have `optimizers` train its shards. Collective.

    The config file says what is gathered on its own (fsdp_min_num_params), in which precision (mixed_precision), what
    is freed after the forward pass, whether shards are kept on the CPU, and what compiles the model (dynamo_config).
    Without FSDP, nothing happens.

    A sharded model cannot be copied. Create an AveragedModel of the unsharded model, and call `shard(accelerator,
    average.module)` after `prepare`.

    Raises:
        SystemExit: if the config file asks for what this does not do, or the model has a parameter without dimensions,
            which has no rows to share.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    if isinstance(model, FSDPModule):
        return
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    if scalars:
        stop(f"FSDP cannot shard a parameter of shape (), and {', '.join(scalars)} is one: give it shape (1,)")
    plugin, dynamo = accelerator.state.fsdp_plugin, accelerator.state.dynamo_plugin
    is_set = {key: getattr(plugin, key) for key in ("cpu_ram_efficient_loading", "activation_checkpointing")}
    is_set["offload_params"] = isinstance(plugin.cpu_offload, CPUOffloadPolicy) and accelerator.device.type == "cpu"
    for key in [key for key, value in is_set.items() if value]:
        stop(f"fsdp_{key}: true in the config file does not work with this script and device: set it to false")
    options = {
        "mesh": init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
    }
    model.to(memory_format=torch.contiguous_format)  # fully_shard takes no other; images may stay channels_last
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:  # without the whole parameters, which would stay in memory
        group[:] = [names.get(parameter, parameter) for parameter in group]
    names.clear()
    alone = units(model, plugin.min_num_params or 0)
    policy = policy_of_model = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    if policy.param_dtype:
        # Autocast, as with DDP: fully_shard would cast arguments only, and copy lists of them, such as caches.
        model.forward = torch.autocast(accelerator.device.type, policy.param_dtype)(model.forward)
        policy = dataclasses.replace(policy, cast_forward_inputs=False)
        policy_of_model = dataclasses.replace(policy, output_dtype=torch.float32)  # for the loss
        for module in [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]:
            fully_shard(module, **options)  # float32, like its statistics
        alone = [module for module in alone if not isinstance(module, FSDPModule)]
    for module in alone:
        fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy_of_model, **options)
    if dynamo.backend != DynamoBackend.NO:
        model.compile(**dynamo.to_kwargs())
    shards = dict(model.named_parameters())
    for group in groups:
        group[:] = [shards.get(parameter, parameter) for parameter in group]


def build(accelerator: Accelerator, make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a model of which, under FSDP, no process ever holds more than its shards and one parameter. Collective.

    The numbers of a parameter depend on the seed and its name, so they are the same on any number of processes.

    Args:
        make_model: returns a model without buffers, with a method `initialize(name, parameter)`, which draws the
            numbers of a parameter. Under FSDP its constructor runs on the meta device: nothing has numbers yet.

    Raises:
        SystemExit: if the model has buffers: nobody would know their numbers.
    """
    is_fsdp = accelerator.distributed_type == DistributedType.FSDP
    with torch.device("meta" if is_fsdp else "cpu"):
        model = make_model()
    if buffers := [name for name, _ in model.named_buffers()]:
        stop(f"fsdp.build cannot make a model with buffers, such as {buffers[0]}: make it without fsdp.build")
    if is_fsdp:
        shard(accelerator, model)
        model.to_empty(device=accelerator.device)
    with torch.no_grad(), generators_restored():
        for name, parameter in model.named_parameters():
            seed_generators(combine(seed, zlib.crc32(name.encode())))
            local, first = own_rows(parameter)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            model.initialize(name, whole)
            local.copy_(whole[first : first + len(local)])
    return model


def check_sharded(optimizers: list[Optimizer]) -> None:
    """Stop if an optimizer trains what no model in the same `prepare` owns: nobody would average its gradients."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if not all(hasattr(parameter, "to_local") for parameter in parameters):
        stop(
            "an optimizer trains a parameter that FSDP has not sharded: give accelerator.prepare a model and its "
            "optimizers in one call, and register each parameter in a model"
        )


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
