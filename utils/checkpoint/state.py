"""Models, optimizers and any other object as named tensors and JSON. Nothing that is read back is executed.

`save` returns tensors and JSON, either of which may be None; sharded tensors stay DTensors. `load` takes what any
number of processes saved, sharded or not. `must_match` describes the object before the first step, and must be the
same when resuming.
"""

from collections import Counter

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..console import stop
from ..parallel.shards import is_sharded, local_rows, plain_name
from .folder import Files, Tensors, make_header

# Implementation switches, not hyperparameters: a resumed run may change them.
IMPLEMENTATION = {"params", "fused", "foreach", "capturable"}
# A scheduler's counters, as opposed to its settings (private attribute names of torch).
PROGRESS = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


class SavedTensor:
    """A tensor in a checkpoint, memory-mapped from one file or, if it was sharded, from the files of several ranks.

    Args:
        parts: the rows of each rank, in the order of the ranks.
    """

    def __init__(self, parts: list[torch.Tensor]):
        self.parts, self.dtype, self.shape = parts, parts[0].dtype, parts[0].shape
        if len(parts) > 1:
            self.shape = torch.Size((sum(map(len, parts)), *self.shape[1:]))

    def whole(self) -> torch.Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def slice_rows(self, start: int, end: int) -> torch.Tensor:
        """Rows `start` to `end` - 1; reads nothing else from the disk."""
        rows = []
        for part in self.parts:
            rows.append(part[max(start, 0) : max(end, 0)])
            start, end = start - len(part), end - len(part)
        return torch.cat(rows)


class ModelState:
    """An unwrapped model: parameters and buffers by their plain names."""

    def __init__(self, model: nn.Module):
        self.model = model
        tensors, _ = self.save()
        make_header(tensors)  # fails now, and not at the first checkpoint, at a type that safetensors lacks: complex128
        self.must_match = {name: type_and_shape(tensor) for name, tensor in tensors.items()}

    def save(self) -> tuple[Tensors, None]:
        return {plain_name(name): tensor for name, tensor in self.model.state_dict().items()}, None

    def load(self, stored: dict[str, SavedTensor], _) -> None:
        state = {}
        for name, tensor in self.model.state_dict().items():
            saved = stored[plain_name(name)]
            state[name] = read_like(tensor, saved) if is_sharded(tensor) else saved.whole()
        self.model.load_state_dict(state)  # copies


class OptimizerState:
    """An optimizer: its tensors as <parameter name>/<state name>, with `names` by id.

    The JSON has "groups": the hyperparameters, and "non_tensors": the rest of the state, such as LBFGS's lists.
    """

    def __init__(self, optimizer: Optimizer, names: dict[int, str]):
        self.optimizer, self.names = optimizer, names
        groups = to_json(optimizer.param_groups, leave_out=IMPLEMENTATION)
        self.must_match = {"class": type(optimizer).__name__, "groups": groups}
        for number, group in enumerate(optimizer.param_groups):
            self.must_match |= {names[id(parameter)]: f"group {number}" for parameter in group["params"]}

    def save(self) -> tuple[Tensors, dict]:
        tensors, non_tensors = {}, {}
        for parameter, entries in self.optimizer.state.items():
            for name, value in entries.items():
                key = f"{self.names[id(parameter)]}/{name}"
                non_tensors[key] = take_out_tensors(value, tensors, key)
        return tensors, {
            "groups": to_json(self.optimizer.param_groups, leave_out={"params"}),
            "non_tensors": {key: value for key, value in non_tensors.items() if key not in tensors},
        }

    def load(self, stored: dict[str, SavedTensor], saved: dict) -> None:
        for group, hyperparameters in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            for key, value in hyperparameters.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key] = torch.full_like(group[key], value)
                elif key not in IMPLEMENTATION and value is not None:  # None: not JSON, so the run's own stays
                    group[key] = tuple(value) if isinstance(value, list) else value
        state, numbered = {}, enumerate(list_parameters(self.optimizer))  # by number, as torch knows them
        parameters = {self.names[id(parameter)]: (number, parameter) for number, parameter in numbered}
        for key, value in {**stored, **saved["non_tensors"]}.items():
            name, _, entry = key.rpartition("/")
            if name in parameters:  # a pipeline's process has some of them
                number, parameter = parameters[name]
                state.setdefault(number, {})[entry] = load_entry(parameter, value, stored)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def load_entry(parameter: torch.Tensor, value, stored: dict[str, SavedTensor]):
    """An entry of an optimizer's state: a tensor, or JSON as from `take_out_tensors`."""
    if not isinstance(value, SavedTensor):
        return put_back_tensors(value, stored)
    # With the strides of the parameter: a fused step reads the memory of both side by side.
    return read_like(parameter, value) if value.shape == parameter.shape else value.whole().clone()


class ObjectState:
    """Anything else with a state_dict: a tensor is named by its path, such as queue/items/3."""

    def __init__(self, name: str, instance):
        self.name, self.instance = name, instance
        tensors, _ = self.save()  # stops now, and not at the first checkpoint
        make_header(tensors or {})
        self.must_match = {"class": type(instance).__name__}
        if isinstance(instance, LRScheduler):
            self.must_match |= to_json(instance.state_dict(), leave_out=PROGRESS)

    def save(self) -> tuple[Tensors | None, object]:
        tensors = {}
        saved = take_out_tensors(self.instance.state_dict(), tensors, self.name)
        return tensors or None, saved

    def load(self, stored: dict[str, SavedTensor], saved) -> None:
        self.instance.load_state_dict(put_back_tensors(saved, stored))


def take_out_tensors(state, tensors: Tensors, path: str):
    """A state_dict, or a part of it, as JSON: each tensor goes to `tensors` and leaves {"tensor": path}."""
    if isinstance(state, torch.Tensor):
        tensors[path] = state
        return {"tensor": path}
    if isinstance(state, (list, tuple)):
        return {"list": [take_out_tensors(value, tensors, f"{path}/{index}") for index, value in enumerate(state)]}
    if isinstance(state, dict) and all(type(key) in (str, int) for key in state):
        entries = {str(key): take_out_tensors(value, tensors, f"{path}/{key}") for key, value in state.items()}
        int_keys = [str(key) for key in state if isinstance(key, int)]
        # MultiStepLR has its milestones in a Counter.
        return {"dict": entries, "int_keys": int_keys, "counter": isinstance(state, Counter)}
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    what = f"dict with the keys {list(state)}" if isinstance(state, dict) else type(state).__name__
    stop(f"{path} cannot be saved: it is a {what}, which is neither a tensor nor JSON")


def put_back_tensors(state, stored: dict[str, SavedTensor]):
    """The inverse of `take_out_tensors`. Tensors are copied; tuples come back as lists."""
    if not isinstance(state, dict):
        return state
    if "tensor" in state:
        return stored[state["tensor"]].whole().clone()
    if "list" in state:
        return [put_back_tensors(value, stored) for value in state["list"]]
    entries = {}
    for key, value in state["dict"].items():
        entries[int(key) if key in state["int_keys"] else key] = put_back_tensors(value, stored)
    return Counter(entries) if state["counter"] else entries


def to_json(state, leave_out: set[str]):
    """The JSON in a state_dict, without the entries in `leave_out`; everything else becomes None."""
    if isinstance(state, dict):
        return {str(key): to_json(value, leave_out) for key, value in state.items() if key not in leave_out}
    if isinstance(state, (list, tuple)):
        return [to_json(value, leave_out) for value in state]
    if isinstance(state, torch.Tensor) and state.numel() == 1:
        return state.item()
    return state if isinstance(state, (bool, int, float, str)) else None


def tensor_parts(files: Files) -> set[tuple[str, str, int]]:
    """The file, name and first row of the tensors that this process has, whole or some rows of them."""
    return {(file, name, local_rows(tensor)[1]) for file, tensors in files.items() for name, tensor in tensors.items()}


def files_to_write(files: Files, share: set[tuple[str, str, int]], rank: int) -> Files:
    """The `share` of a rank of tensors by file."""
    chosen = {}
    for file, tensors in files.items():
        parts = {name: local_rows(tensor) for name, tensor in tensors.items()}
        parts = {name: local for name, (local, first) in parts.items() if (file, name, first) in share}
        if parts or rank == 0:
            chosen[f"{file.removesuffix('.safetensors')}.rank_{rank}.safetensors" if rank else file] = parts
    return chosen


def read_like(tensor: torch.Tensor, stored: SavedTensor) -> torch.Tensor:
    """The saved values with the strides and device of `tensor`, and this process's rows of them if it is sharded."""
    result = torch.empty_like(tensor, dtype=stored.dtype, requires_grad=False)
    local, first = local_rows(result)
    local.copy_(stored.slice_rows(first, first + len(local)) if is_sharded(tensor) else stored.whole())
    return result


def list_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(models: dict[str, nn.Module], optimizers: dict[str, Optimizer]) -> dict[int, str]:
    """A name for each parameter, by id, with the model's name before it if several models are trained.

    A parameter of no model has the name of its optimizer and its position there.
    """
    trained = {id(p) for optimizer in optimizers.values() for p in list_parameters(optimizer)}
    trained_models = {n: m for n, m in models.items() if any(id(p) in trained for p in m.parameters())}
    names = {}
    for model_name, model in trained_models.items():
        prefix = f"{model_name}." if len(trained_models) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + plain_name(name))
    for optimizer_name, optimizer in optimizers.items():
        for position, parameter in enumerate(list_parameters(optimizer)):
            names.setdefault(id(parameter), f"{optimizer_name}.{position}")
    return names


def type_and_shape(tensor: torch.Tensor) -> str:
    """Such as "float32 (2, 4)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
