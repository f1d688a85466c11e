"""Models, optimizers and any other object as named tensors and JSON: nothing that is read back is executed."""

from collections import Counter
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..console import stop
from ..features import feature

# How an optimizer computes its step, and not what it is: may change between a run and its resume.
IMPLEMENTATION = {"params", "fused", "foreach", "capturable"}
# What a schedule keeps besides its settings: private names of torch.
PROGRESS = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


# --- any state_dict ---------------------------------------------------------------------------


def take_out_tensors(state, tensors: dict[str, torch.Tensor], path: str):
    """A state_dict, or a part of it, as JSON. Each tensor goes to `tensors`, and {"tensor": its name} takes its place.

    Args:
        path: the name of a tensor is its place, such as queue/items/3.
    """
    if isinstance(state, torch.Tensor):
        tensors[path] = state
        return {"tensor": path}
    if isinstance(state, (list, tuple)):
        return {"list": [take_out_tensors(value, tensors, f"{path}/{place}") for place, value in enumerate(state)]}
    if isinstance(state, dict):
        entries = {}
        for key, value in state.items():
            if type(key) not in (str, int) or str(key) in entries:
                stop(f"{path} cannot be saved: it is a dict with the key {key!r}")
            entries[str(key)] = take_out_tensors(value, tensors, f"{path}/{key}")
        int_keys = [str(key) for key in state if isinstance(key, int)]
        # MultiStepLR has its milestones in a Counter.
        return {"dict": entries, "int_keys": int_keys, "counter": isinstance(state, Counter)}
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    stop(f"{path} cannot be saved: it is a {type(state).__name__}, which is neither a tensor nor JSON")


def put_back_tensors(state, tensors: dict[str, torch.Tensor]):
    """The inverse of `take_out_tensors`; tuples come back as lists."""
    if not isinstance(state, dict):
        return state
    if "tensor" in state:
        return tensors[state["tensor"]]
    if "list" in state:
        return [put_back_tensors(value, tensors) for value in state["list"]]
    entries = {}
    for key, value in state["dict"].items():
        entries[int(key) if key in state["int_keys"] else key] = put_back_tensors(value, tensors)
    return Counter(entries) if state["counter"] else entries


def plain_values(state, leave_out: set[str]):
    """The JSON in a state_dict, without the entries in `leave_out`; None in the place of anything else."""
    if isinstance(state, dict):
        return {str(key): plain_values(value, leave_out) for key, value in state.items() if key not in leave_out}
    if isinstance(state, (list, tuple)):
        return [plain_values(value, leave_out) for value in state]
    if isinstance(state, torch.Tensor) and state.numel() == 1:
        return state.item()
    return state if isinstance(state, (bool, int, float, str)) else None


def load_object(instance, state: dict) -> None:
    # A schedule of another version of torch: entries that are missing would stay at their first values.
    if isinstance(instance, LRScheduler) and state.keys() != instance.state_dict().keys():
        raise ValueError(f"it has {', '.join(state)}")
    instance.load_state_dict(state)


# --- models -----------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile adds, to the model or to layers of it."""
    return name.replace("_orig_mod.", "")


def sharding(accelerator: Accelerator):
    """The feature fsdp where models are sharded, elsewhere None."""
    return feature("fsdp", "a sharded model") if accelerator.distributed_type == DistributedType.FSDP else None


def model_state(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of an unwrapped model by plain names; if it is sharded, whole, on the main process. Collective."""
    if fsdp := sharding(accelerator):
        return fsdp.whole_model_state(model)
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


def load_model(accelerator: Accelerator, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Load what `model_state` returned, on any number of processes, sharded or not. Collective."""
    if fsdp := sharding(accelerator):
        fsdp.load_whole_model(model, saved)
    else:
        model.load_state_dict({name: saved[plain_name(name)] for name in model.state_dict()})


def join_parts(accelerator: Accelerator, entries: dict, model_copy: int | None) -> dict:
    """`entries`, and those of the other processes where each has a part of the model. Collective."""
    if model_copy is None or accelerator.num_processes == 1:
        return entries
    return feature("pipeline", "a model in parts").join_parts(accelerator, entries, model_copy)


# --- optimizers -------------------------------------------------------------------------------


def name_parameters(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[int, str]:
    """A name for each parameter, by id, so that the state of an optimizer does not depend on their order.

    With the model's name before it if several models are trained. A parameter of no model has the
    name of its optimizer and its position there.
    """
    trained = {id(p) for optimizer in optimizers.values() for p in parameters_of(optimizer)}
    trained_models = {n: m for n, m in models.items() if any(id(p) in trained for p in m.parameters())}
    names = {}
    for model_name, model in trained_models.items():
        prefix = f"{model_name}." if len(trained_models) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + plain_name(name))
    for optimizer_name, optimizer in optimizers.items():
        for position, parameter in enumerate(parameters_of(optimizer)):
            names.setdefault(id(parameter), f"{optimizer_name}.{position}")
    return names


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, str]:
    """The group of each parameter, by name: what the optimizer trains, with state or yet without."""
    return {
        names[id(parameter)]: f"group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def optimizer_state(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, names: dict[int, str], models: Iterable[nn.Module]
) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors as <parameter name>/<state name>, and as JSON the rest. Complete on the main process. Collective.

    The JSON has "groups": the hyperparameters, "numbers": what is not a tensor, such as LBFGS's
    lists, and "parameters": the group of each.
    """
    if fsdp := sharding(accelerator):
        state = fsdp.whole_optimizer_state(models, optimizer)
    else:
        state = {names[id(parameter)]: entries for parameter, entries in optimizer.state.items()}
    tensors, numbers = {}, {}
    for parameter, entries in state.items():
        for name, value in entries.items():
            key = f"{parameter}/{name}"
            without_tensors = take_out_tensors(value, tensors, key)
            if not isinstance(value, torch.Tensor):
                numbers[key] = without_tensors
    groups = plain_values(optimizer.param_groups, leave_out={"params"})
    return tensors, {"groups": groups, "numbers": numbers, "parameters": parameter_groups(optimizer, names)}


def load_optimizer(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    models: Iterable[nn.Module],
    tensors: dict[str, torch.Tensor],
    saved: dict,
) -> None:
    """Load what `optimizer_state` returned, on any number of processes, sharded or not. Collective."""
    for group, hyperparameters in zip(optimizer.param_groups, saved["groups"], strict=True):
        restore_hyperparameters(group, hyperparameters)
    state = {}
    numbers = {key: put_back_tensors(value, tensors) for key, value in saved["numbers"].items()}
    for key, value in {**tensors, **numbers}.items():
        parameter, _, name = key.rpartition("/")
        # Earlier versions wrote names of torch.compile.
        state.setdefault(plain_name(parameter), {})[name] = value
    if fsdp := sharding(accelerator):
        fsdp.load_whole_optimizer(models, optimizer, state)
        return
    # torch knows a parameter by its position.
    by_position = {
        position: {name: laid_out_like(parameter, value) for name, value in state[names[id(parameter)]].items()}
        for position, parameter in enumerate(parameters_of(optimizer))
        if names[id(parameter)] in state
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_position})


def restore_hyperparameters(group: dict, saved: dict) -> None:
    """Set those of an optimizer's param_group to the ones in a checkpoint."""
    for key, value in saved.items():
        # None where JSON has no word for a value, such as a function: the run's own one stays.
        if key in IMPLEMENTATION or value is None:
            continue
        if isinstance(group.get(key), torch.Tensor):
            value = torch.full_like(group[key], value)
        group[key] = tuple(value) if isinstance(value, list) else value


def laid_out_like(parameter: torch.Tensor, value):
    """A state of a parameter with the strides of the parameter, as it had them before it was saved.

    A fused optimizer step goes through the memory of both side by side and looks at no strides:
    otherwise a weight with channels last would get the momentum of other weights.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


# --- what must match when resuming ------------------------------------------------------------


def invariants(instance) -> dict:
    """The class of an optimizer or other object, with the hyperparameters or the settings of a schedule."""
    found = {"class": type(instance).__name__}
    if isinstance(instance, torch.optim.Optimizer):
        found["groups"] = plain_values(instance.param_groups, leave_out=IMPLEMENTATION)
    elif isinstance(instance, LRScheduler):
        found |= plain_values(instance.state_dict(), leave_out=PROGRESS)
    return found


def shapes(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """The dtype and shape of each tensor by its plain name, such as "float32 (2, 4)"."""
    return {
        plain_name(name): f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in state.items()
    }


def differences(saved: dict, current: dict) -> list[str]:
    """Sentences such as "optimizer.lr was 0.1 and is 0.2"; classes first: other differences follow from them."""
    saved, current = flat(saved), flat(current)
    names = sorted(saved.keys() | current.keys(), key=lambda name: (not name.endswith(".class"), name))
    return [
        f"{name.replace('.groups', '')} was {saved.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]


def flat(values, path: str = "") -> dict:
    """Nested dicts and lists as one dict with names such as optimizer.lr."""
    if isinstance(values, list) and len(values) == 1:
        return flat(values[0], path)
    if isinstance(values, (dict, list)):
        result = {}
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            result |= flat(value, f"{path}.{name}" if path else str(name))
        return result
    return {path: values}
