"""FSDP2 and HSDP (fsdp.yaml, hsdp.yaml, ...): making and averaging models whose parameters are sharded over processes.

Under HSDP, each machine, or part of it, has a replica of the model, which is sharded over its processes.
"""

import dataclasses
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ..agree import compare
from ..console import stop
from ..randomness import combine, generators_restored, seed_generators
from .same_state import sum_bits
from .shards import is_sharded, local_rows

HOOKS = (  # meta-pytorch/torchrec#4268
    "FSDP calls no hooks set by register_hook or before prepare: use register_post_accumulate_grad_hook after prepare, "
    "where parameter.grad is a shard of the average over the processes"
)
RANDOM = (
    "under FSDP each process holds a shard, so random initial weights would depend on the number of processes: "
    "initialize before prepare"
)
REFUSED = {"register_hook": HOOKS, "normal_": RANDOM, "uniform_": RANDOM}  # torch.nn.init calls one of the last two


class ShardProxy(nn.Parameter):
    """A parameter from before `prepare`: operations on it act on the `shard` that has replaced it in the model.

    So a list of parameters made before `prepare` can be clipped, frozen or given to an optimizer, as with DDP.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if sentence := REFUSED.get(getattr(func, "__name__", None)):
            stop(sentence)
        args, kwargs = tree_map_only(cls, lambda parameter: parameter.shard, (args, kwargs or {}))
        return func(*args, **kwargs)


def redirect_to_shard(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    """Free a parameter's memory, and redirect operations on it to its shard."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        stop(HOOKS)
    parameter.data = parameter.data.new_empty(0)
    parameter.__class__, parameter.shard = ShardProxy, shard
    for name, sentence in REFUSED.items():
        setattr(shard, name, lambda *_, sentence=sentence, **__: stop(sentence))


def shards_of(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The shards of `parameters`, which may be from before `prepare`."""
    shards = [getattr(parameter, "shard", parameter) for parameter in parameters]
    if not all(map(is_sharded, shards)):
        stop(
            "a parameter to train or to clip is not sharded, so its gradient would not be averaged: register it in a "
            "model, and give accelerator.prepare that model and its optimizers in one call"
        )
    return shards


def train_shards(optimizer: Optimizer) -> None:
    """Replace the parameters of an optimizer by their shards."""
    for parameter in [parameter for parameter in optimizer.state if not is_sharded(parameter)]:
        del optimizer.state[parameter]  # of the whole tensor, as Adagrad makes it at once
    for group in optimizer.param_groups:
        group["params"][:] = shards_of(group["params"])


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


def policies(model: nn.Module, plugin, device_type: str) -> dict[nn.Module, Any]:
    """The modules that are sharded on their own, the model last, and their MixedPrecisionPolicy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    found = dict.fromkeys([*units(model, plugin.min_num_params or 0), model], policy)
    if policy.param_dtype:
        # Autocast, as with DDP: fully_shard would cast arguments only, and copy lists of them, such as caches.
        model.forward = torch.autocast(device_type, policy.param_dtype)(model.forward)
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        found = dict.fromkeys([*norms, *found], dataclasses.replace(policy, cast_forward_inputs=False))
        found[model] = dataclasses.replace(found[model], output_dtype=torch.float32)  # for the loss
        found |= dict.fromkeys(norms, MixedPrecisionPolicy())  # float32, like their statistics
    return found


def shard(accelerator: Accelerator, model: nn.Module) -> None:
    """Shard a model in place with torch's fully_shard. Collective.

    The config file says what is gathered on its own (fsdp_min_num_params), in which precision (mixed_precision), what
    is freed after the forward pass, whether shards are kept on the CPU, and what compiles the model (dynamo_config).
    Without FSDP, nothing happens.

    A sharded model cannot be copied. Create an AveragedModel of the unsharded model, and call `shard(accelerator,
    average.module)` after `prepare`.

    Raises:
        ValueError: by torch, if the model has a parameter without dimensions, which has no rows to share.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(model, FSDPModule):
        return
    if not any(parameter.is_meta for parameter in model.parameters()):
        _, ranks, differing = compare(sum_bits(accelerator, dict(model.named_parameters())))
        if differing:
            stop(
                f"{next(iter(differing))} differs between {ranks[0]} and {ranks[1]}, and unlike DDP, FSDP copies no "
                "weights: all processes must make or load them, from the same seed or file"
            )
    plugin, dynamo = accelerator.state.fsdp_plugin, accelerator.state.dynamo_plugin
    options = {
        # Virtual processes add gradients between the replicas, too.
        "mesh": accelerator.mesh["shards"] if accelerator.layout.virtual_processes else accelerator.mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
    }
    model.to(memory_format=torch.contiguous_format)  # fully_shard takes no other; images may stay channels_last
    for number, (module, policy) in enumerate(policies(model, plugin, accelerator.device.type).items()):
        whole = list(module.parameters())
        fully_shard(module, mp_policy=policy, **options)
        for parameter, replacement in zip(whole, module.parameters(), strict=True):
            if parameter is not replacement:
                redirect_to_shard(parameter, replacement)
        if dynamo.backend == DynamoBackend.NO:
            module.register_forward_hook(refuse_freed)
            module.register_forward_hook(refuse_written, prepend=True)
            module.register_forward_pre_hook(functools.partial(count_call, accelerator, number))
    ids = [*map(id, model.parameters())]

    def check(*_) -> None:
        """Runs before the first forward pass, which would undo ties made after prepare: facebookresearch/lingua#75."""
        if [*map(id, model.parameters())] != ids:
            stop("FSDP does not see parameters that are tied or replaced after prepare: do so before")
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)
    if dynamo.backend != DynamoBackend.NO:
        model.compile(**dynamo.to_kwargs())


def count_call(accelerator: Accelerator, number: int, *_) -> None:
    """Add a unit's call to a number that differs between processes if they have called others, or in another order.

    FSDP would gather halves of two layers of one size into one (numbers off by a factor of 2), or hang.
    """
    accelerator.sharded_calls = zlib.crc32(b"%d" % number, accelerator.sharded_calls)


def refuse_written(module: nn.Module, *_) -> None:
    """Stop if the forward pass has written into a weight, as nn.Embedding(max_norm=...) does."""
    state = module._get_fsdp_state()
    # In older versions of torch a module has one group, or None.
    groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    for parameter in [parameter for group in groups if group for parameter in group.fsdp_params]:
        if parameter._unsharded_param._version > 0:
            stop(
                f"the forward pass writes into {parameter._param_fqn}: FSDP gathers a copy of a weight for it, so what "
                "is written there is lost; write after optimizer.step(), under torch.no_grad()"
            )


def refuse_freed(module: nn.Module, _, output) -> None:
    """Stop if an output lies in memory that is free: torch would read what lies there now, or end the process."""
    for tensor in tree_leaves(output):
        is_whole = isinstance(tensor, torch.Tensor) and not is_sharded(tensor)
        if is_whole and tensor.numel() and not tensor.untyped_storage().size():
            name = type(module).__name__.removeprefix("FSDP")
            stop(
                f"the forward pass of {name} returns a parameter or a view of one, whose memory FSDP frees after that "
                "pass: return a copy of it, such as parameter + 0.0"
            )


def build(accelerator: Accelerator, make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a model of which, under FSDP, no process ever holds more than its shards and one parameter. Collective.

    The numbers of a parameter depend on the seed and its name, so they are the same on any number of processes.

    Args:
        make_model: returns a model without buffers, with a method `initialize(name, parameter)`, which draws the
            numbers of a parameter. Under FSDP its constructor runs on the meta device: nothing has numbers yet.
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
            local, first = local_rows(parameter)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            model.initialize(name, whole)
            local.copy_(whole[first : first + len(local)])
    return model


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average = decay x average + (1 - decay) x model, on each process for its own shards; integers are copied.

    AveragedModel.update_parameters waits for the GPU, and takes four operations for each of BatchNorm's counts.
    """
    to_average, to_copy = [], []
    for pair in zip(*([*part.parameters(), *part.buffers()] for part in (average, model)), strict=True):
        # Not as DTensors: a model also has plain buffers, and torch does not accept mixed lists.
        shards = [local_rows(tensor)[0] for tensor in pair]
        (to_average if decay and shards[0].is_floating_point() else to_copy).append(shards)
    if to_average:
        torch._foreach_lerp_(*zip(*to_average, strict=True), 1 - decay)
    if to_copy:
        torch._foreach_copy_(*zip(*to_copy, strict=True))
