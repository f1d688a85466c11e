"""The tensors of a prepared model: which rows of a sharded one this process has, and their plain names."""

import math

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. (Importing the class takes half a second.)"""
    return hasattr(tensor, "to_local")


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This process's rows of a sharded tensor, and the index of the first; or the whole of any other tensor, and 0."""
    if not is_sharded(tensor):
        return tensor, 0
    mesh = tensor.device_mesh  # its last dimension; under HSDP the first is that of the replicas
    first = mesh.get_local_rank(mesh.ndim - 1) * math.ceil(len(tensor) / mesh.shape[-1])  # as torch.chunk
    return tensor.to_local(), min(first, len(tensor))


def plain_name(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile adds, to the model or to layers of it."""
    return name.replace("_orig_mod.", "")
