"""The state of an optimizer by the names of its parameters, so that it does not depend on their order."""

from collections.abc import Iterable

import torch
from torch import nn

from .models import fsdp, is_sharded, plain_name
from .objects import as_plain_values, put_back_tensors, take_out_tensors

# How an optimizer computes its step, and not what it is: may change between a run and its resume.
IMPLEMENTATION = {"params", "fused", "foreach", "capturable"}


def name_parameters(models: dict[str, nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> dict[int, str]:
    """A name for each parameter, by id.

    Plain if there is one model, else with the model's name before it. A model that no optimizer has
    parameters of, such as a moving average, does not count. A parameter of no model has the name of
    its optimizer and its position there.
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


def optimizer_invariants(optimizer: torch.optim.Optimizer) -> dict:
    """What must match when resuming: the class and the hyperparameters at the start of the run."""
    groups = as_plain_values(optimizer.param_groups, leave_out=IMPLEMENTATION)
    return {"class": type(optimizer).__name__, "groups": groups}


def parameter_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, str]:
    """The group of each parameter, by name: what the optimizer trains, with state or yet without."""
    return {
        names[id(parameter)]: f"group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], models: Iterable[nn.Module]
) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors as <parameter name>/<state name>, and as JSON the rest. Collective if a model is sharded.

    Returns:
        The tensors, complete on the main process, and a dict with "groups": the hyperparameters,
        "numbers": by <parameter name>/<state name> what is not a tensor, such as LBFGS's lists, and
        "parameters": by name the group of each.

    Raises:
        TypeError: naming the state that is neither.
    """
    sharded = sharded_model_of(optimizer, models)
    if sharded is None:
        state = {names[id(parameter)]: entries for parameter, entries in optimizer.state.items()}
    else:
        state = fsdp().whole_optimizer_state(sharded, optimizer)
    tensors, numbers = {}, {}
    for parameter, entries in state.items():
        for name, value in entries.items():
            key = f"{parameter}/{name}"
            without_tensors, found = take_out_tensors(value, key)
            tensors |= found
            if not isinstance(value, torch.Tensor):
                numbers[key] = without_tensors
    groups = as_plain_values(optimizer.param_groups, leave_out={"params"})
    return tensors, {"groups": groups, "numbers": numbers, "parameters": parameter_groups(optimizer, names)}


def sharded_model_of(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> nn.Module | None:
    """The sharded model that the optimizer has parameters of."""
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    for model in models:
        if is_sharded(model) and any(id(parameter) in trained for parameter in model.parameters()):
            return model
    return None


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    models: Iterable[nn.Module],
    tensors: dict[str, torch.Tensor],
    saved: dict,
) -> None:
    """Load what `optimizer_state` returned, on any number of processes. Collective if a model is sharded.

    Args:
        names: as from `name_parameters`. State of other parameters is left out.
    """
    state = state_by_parameter(tensors, saved["numbers"])

    def restore_groups(groups):
        for group, values in zip(groups, saved["groups"], strict=True):
            restore_hyperparameters(group, values)

    sharded = sharded_model_of(optimizer, models)
    if sharded is not None and state:
        fsdp().load_whole_optimizer(sharded, optimizer, state, restore_groups)
        return
    current = optimizer.state_dict()
    restore_groups(current["param_groups"])
    # state_dict() has a number in the place of each parameter.
    numbers = [number for group in current["param_groups"] for number in group["params"]]
    numbered = {n: state.get(names[id(p)]) for n, p in zip(numbers, parameters_of(optimizer), strict=True)}
    current["state"] = {number: entries for number, entries in numbered.items() if entries is not None}
    optimizer.load_state_dict(current)
    lay_out_like_parameters(optimizer)


def state_by_parameter(tensors: dict[str, torch.Tensor], numbers: dict) -> dict[str, dict]:
    """The state of each parameter by name, from the tensors and the JSON of `optimizer_state`."""
    entries = {key: put_back_tensors(value, tensors) for key, value in numbers.items()}
    # Those in a list or dict are there already, as <parameter name>/<state name>/<place>.
    nested = tuple(f"{key}/" for key, value in numbers.items() if isinstance(value, dict))
    entries |= {key: tensor for key, tensor in tensors.items() if not key.startswith(nested)}
    state = {}
    for key, value in entries.items():
        parameter, _, name = key.rpartition("/")
        # Earlier versions wrote names of torch.compile.
        state.setdefault(plain_name(parameter), {})[name] = value
    return state


def restore_hyperparameters(group: dict, saved: dict) -> None:
    """Set those of an optimizer's param_group to the ones in a checkpoint, in place."""
    for key, value in saved.items():
        # None where JSON has no word for a value, such as a function: the run's own one stays.
        if key in IMPLEMENTATION or value is None:
            continue
        if isinstance(group.get(key), torch.Tensor):
            value = torch.full_like(group[key], value)
        group[key] = tuple(value) if isinstance(value, list) else value


def lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the strides of its parameter, as it had them before it was saved.

    A fused optimizer step goes through the memory of both side by side and looks at no strides:
    after a load, a weight with channels last would get the momentum of other weights.
    """
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
                continue
            if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
