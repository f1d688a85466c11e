"""The state of models, optimizers and other objects: by name, as tensors and JSON."""

import hashlib
import math
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn

from ..atomic_files import fsync_file
from ..features.fsdp import full_state_options, is_sharded

# What a schedule keeps besides its settings; private names of torch, which may be others in its
# next version.
PROGRESS = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


def whole_model(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model by plain names; gathered on the main process if it is sharded.
    Collective."""
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=full_state_options())


def join_parts(accelerator: Accelerator, copy: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the main process, the tensors of all processes of copy 0, each of which has some of them.
    Collective."""
    if accelerator.num_processes == 1:
        return tensors
    parts = [None] * accelerator.num_processes if accelerator.is_main_process else None
    mine = {name: tensor.cpu() for name, tensor in tensors.items()} if copy == 0 else {}
    torch.distributed.gather_object(mine, parts)
    for part in parts or []:
        tensors = tensors | part
    return tensors


def savable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors takes them: contiguous, and no two in the same memory, as tied weights are."""
    seen, result = set(), {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a file of safetensors through to the disk, without a copy in memory; returns its
    SHA-256 in hex.

    tensors: as `savable` returns them. Raises: OSError.
    """
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    # For those who may read the folder: safetensors makes it for its owner alone.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_to_cpu(tensors: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies of `tensors` on the CPU, in the memory of `copies` where that fits: new
    memory takes three times as long, because the system clears it first."""
    result = {}
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        result[name] = copy.copy_(tensor.detach())
    return result


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


def split_tensors(state, path: str = "") -> tuple[object, dict[str, torch.Tensor]]:
    """A state_dict as JSON with {"tensor": name} in the place of each tensor, and the tensors by
    name.

    Raises: TypeError for anything but dicts with strings or integers as keys, lists, tuples,
    tensors, numbers, strings and None.
    """
    if isinstance(state, torch.Tensor):
        return {"tensor": path}, {path: state}
    if isinstance(state, (dict, list, tuple)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        parts, tensors = {}, {}
        for name, part in pairs:
            if not isinstance(name, (str, int)) or isinstance(name, bool) or str(name) in parts:
                raise TypeError(f"{path or 'its state'} is a dict with the key {name!r}")
            parts[str(name)], more = split_tensors(part, f"{path}/{name}" if path else str(name))
            if not tensors.keys().isdisjoint(more):
                raise TypeError(f"{path or 'its state'} has two tensors of one name because of a key with a /")
            tensors |= more
        if isinstance(state, dict):
            int_keys = [str(name) for name in state if isinstance(name, int)]
            is_counter = isinstance(state, Counter)  # MultiStepLR has its milestones in one
            return {"dict": parts, "int_keys": int_keys, "counter": is_counter}, tensors
        return {"list": list(parts.values())}, tensors
    if state is None or isinstance(state, (bool, int, float, str)):
        return state, {}
    raise TypeError(f"{path or 'its state'} is a {type(state).__name__}")


def join_tensors(state, tensors: dict[str, torch.Tensor]):
    """The inverse of `split_tensors`; tuples come back as lists."""
    if not isinstance(state, dict):
        return state
    if "tensor" in state:
        return tensors[state["tensor"]]
    if "list" in state:
        return [join_tensors(part, tensors) for part in state["list"]]
    ints = set(state["int_keys"])
    joined = {int(name) if name in ints else name: join_tensors(part, tensors) for name, part in state["dict"].items()}
    return Counter(joined) if state["counter"] else joined


def plain_facts(state):
    """What of a state_dict is JSON, for comparing: a function or an object is left out."""
    if isinstance(state, dict):
        return {str(name): plain_facts(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain_facts(part) for part in state]
    if isinstance(state, torch.Tensor) and state.numel() == 1:
        return state.item()
    return state if isinstance(state, (bool, int, float, str)) else None


def without_progress(state):
    """The settings in the state_dict of a schedule, and of the schedules that it is made of."""
    if isinstance(state, dict):
        return {name: without_progress(part) for name, part in state.items() if name not in PROGRESS}
    if isinstance(state, (list, tuple)):
        return [without_progress(part) for part in state]
    return state


def flat(facts, path: str = "") -> dict:
    """Nested dicts and lists as one dict with names such as optimizer.lr."""
    if isinstance(facts, list) and len(facts) == 1:
        return flat(facts[0], path)
    if isinstance(facts, (dict, list)):
        pairs = facts.items() if isinstance(facts, dict) else enumerate(facts)
        result = {}
        for name, part in pairs:
            result |= flat(part, f"{path}.{name}" if path else str(name))
        return result
    return {path: facts}


def random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The states of the global generators of torch, Python and NumPy: what your loop draws from
    them goes on."""
    _, python, python_gauss = random.getstate()
    python_gauss = math.nan if python_gauss is None else python_gauss
    _, numpy, position, has_gauss, numpy_gauss = np.random.get_state()
    states = {
        "random_cpu": torch.get_rng_state(),
        "random_python": torch.tensor(python),
        "random_numpy": torch.tensor([position, has_gauss, *numpy.tolist()]),
        # Both draw normal numbers in pairs, and keep the second one. NaN: Python has none.
        "random_gauss": torch.tensor([python_gauss, numpy_gauss], dtype=torch.float64),
    }
    if accelerator.device.type == "cuda":
        states["random_cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def set_random_states(accelerator: Accelerator, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["random_cpu"])
    version, _, _ = random.getstate()
    python_gauss, numpy_gauss = states["random_gauss"].tolist()
    python_gauss = None if math.isnan(python_gauss) else python_gauss
    random.setstate((version, tuple(states["random_python"].tolist()), python_gauss))
    position, has_gauss, *numpy = states["random_numpy"].tolist()
    np.random.set_state(("MT19937", np.array(numpy, dtype=np.uint32), position, has_gauss, numpy_gauss))
    if accelerator.device.type == "cuda" and "random_cuda" in states:
        torch.cuda.set_rng_state(states["random_cuda"], accelerator.device)
