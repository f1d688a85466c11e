"""Start from pretrained weights (--pretrained)."""

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .parallel.shards import is_sharded, local_rows


def load_rows(model: nn.Module, source: str) -> None:
    """Read from a .safetensors file the rows of a sharded model that this process has."""
    state = model.state_dict()
    with safetensors.safe_open(source, "pt") as file:
        in_file = {(name, *file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if different := in_file ^ {(name, *tensor.shape) for name, tensor in state.items()}:
        raise ValueError(f"names or shapes differ: {', '.join(sorted(name for name, *_ in different))}")
    for name, tensor in state.items():
        local, first = local_rows(tensor)
        # Opened for each tensor: what was read of an open file stays in memory.
        local.copy_(safetensors.safe_open(source, "pt").get_slice(name)[first : first + len(local)])


def load_pretrained(model: nn.Module, source: str, head: str | None = None) -> None:
    """Load weights from a file or a URL into a model that is not yet prepared; into a sharded one, from .safetensors.

    Args:
        source: a .safetensors file, a file written by torch.save, or an https URL of one. No code in it is executed.
            The weights may be its entry "state_dict" or "model", and have names that begin with "module.".
        head: a last layer that keeps its weights if the file has none, or a different number of classes; None: all must
            fit.
    """
    if any(map(is_sharded, model.parameters())):
        return load_rows(model, source)
    if source.startswith("https://"):
        state = torch.hub.load_state_dict_from_url(source, map_location="cpu", weights_only=True, check_hash=True)
    elif source.endswith(".safetensors"):
        state = safetensors.torch.load_file(source)
    else:
        state = torch.load(source, map_location="cpu", weights_only=True)
    for entry in ("state_dict", "model"):  # beside an epoch and an optimizer, as many scripts save it
        state = state[entry] if isinstance(state.get(entry), dict) else state
    consume_prefix_in_state_dict_if_present(state, "module.")  # of DistributedDataParallel
    if head:
        new_head = {f"{head}.{name}": tensor for name, tensor in model.get_submodule(head).state_dict().items()}
        if any(name not in state or state[name].shape != tensor.shape for name, tensor in new_head.items()):
            state |= new_head
    model.load_state_dict(state)
