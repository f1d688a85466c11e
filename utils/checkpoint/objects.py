"""The state_dict of any object, as JSON and tensors: nothing that is read back is executed."""

from collections import Counter

import torch

# What a schedule keeps besides its settings; private names of torch, which may be others in its
# next version.
PROGRESS = {"_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"}


def take_out_tensors(state, path: str = "") -> tuple[object, dict[str, torch.Tensor]]:
    """Split a state_dict into JSON, with {"tensor": name} in the place of each tensor, and the tensors by name.

    Raises:
        TypeError: for anything but dicts with strings or integers as keys, lists, tuples, tensors,
            numbers, strings and None.
    """
    if isinstance(state, torch.Tensor):
        return {"tensor": path}, {path: state}
    if isinstance(state, (dict, list, tuple)):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        entries, tensors = {}, {}
        for name, value in pairs:
            if not isinstance(name, (str, int)) or isinstance(name, bool) or str(name) in entries:
                raise TypeError(f"{path or 'its state'} is a dict with the key {name!r}")
            entries[str(name)], more = take_out_tensors(value, f"{path}/{name}" if path else str(name))
            if not tensors.keys().isdisjoint(more):
                raise TypeError(f"{path or 'its state'} has two tensors of one name because of a key with a /")
            tensors |= more
        if isinstance(state, dict):
            int_keys = [str(name) for name in state if isinstance(name, int)]
            is_counter = isinstance(state, Counter)  # MultiStepLR has its milestones in one
            return {"dict": entries, "int_keys": int_keys, "counter": is_counter}, tensors
        return {"list": list(entries.values())}, tensors
    if state is None or isinstance(state, (bool, int, float, str)):
        return state, {}
    raise TypeError(f"{path or 'its state'} is a {type(state).__name__}")


def put_back_tensors(state, tensors: dict[str, torch.Tensor]):
    """The inverse of `take_out_tensors`; tuples come back as lists."""
    if not isinstance(state, dict):
        return state
    if "tensor" in state:
        return tensors[state["tensor"]]
    if "list" in state:
        return [put_back_tensors(value, tensors) for value in state["list"]]
    ints = set(state["int_keys"])
    entries = {
        int(name) if name in ints else name: put_back_tensors(value, tensors) for name, value in state["dict"].items()
    }
    return Counter(entries) if state["counter"] else entries


def as_plain_values(state, leave_out: set[str] = frozenset()):
    """What of a state_dict is JSON, for comparing and for hyperparameters; None in the place of anything else.

    Args:
        leave_out: keys of dicts, at any depth.
    """
    if isinstance(state, dict):
        return {str(name): as_plain_values(v, leave_out) for name, v in state.items() if name not in leave_out}
    if isinstance(state, (list, tuple)):
        return [as_plain_values(value, leave_out) for value in state]
    if isinstance(state, torch.Tensor) and state.numel() == 1:
        return state.item()
    return state if isinstance(state, (bool, int, float, str)) else None


def object_invariants(instance) -> dict:
    """What of an object must match when resuming: its class, and the settings of a schedule."""
    invariants = {"class": type(instance).__name__}
    if isinstance(instance, torch.optim.lr_scheduler.LRScheduler):
        invariants |= as_plain_values(instance.state_dict(), leave_out=PROGRESS)
    return invariants


def load_object(instance, state: dict) -> None:
    """`instance.load_state_dict(state)`, where a schedule takes over all of its entries.

    Raises:
        ValueError: if a schedule has other entries, as in another version of torch: those that are
            missing would silently stay at their first values.
    """
    if isinstance(instance, torch.optim.lr_scheduler.LRScheduler) and state.keys() != instance.state_dict().keys():
        raise ValueError(f"it has {', '.join(state)}")
    instance.load_state_dict(state)
