"""A tensor as it is recorded."""

import torch

MAX_ENTRIES = 2**14  # a larger tensor is recorded by so many of its entries, evenly spaced, and its norm


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float64 on the CPU, flat: its norm, then its entries, or MAX_ENTRIES of them."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    flat = tensor.detach().flatten()
    norm = torch.linalg.vector_norm(flat.double()).view(1)
    step = max(1, flat.numel() // MAX_ENTRIES)
    return torch.cat([norm, flat[::step].double()]).cpu()
