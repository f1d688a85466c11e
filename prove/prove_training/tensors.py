"""Tensors as they are recorded, the difference of two of them, and digests of samples."""

import contextlib
import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch

MAX_ENTRIES = 2**14  # of a larger tensor, this many entries are recorded, evenly spaced, and its norm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph; of one that is divided over the processes, all of it. Collective then."""
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float64 on the CPU, flat: its norm, then at most 2 * MAX_ENTRIES of its entries."""
    flat = whole(tensor).flatten()
    norm = torch.linalg.vector_norm(flat.double()).view(1)
    step = max(1, flat.numel() // MAX_ENTRIES)
    while math.gcd(step, flat.numel()) > 1:  # else all entries could be of one place in the kernels, and zero
        step -= 1
    return torch.cat([norm, flat[::step].double()]).cpu()


def tensors_in(content) -> list[torch.Tensor]:
    """All of nested content that have a dimension."""
    if isinstance(content, torch.Tensor):
        return [content] if content.ndim else []
    if isinstance(content, Mapping):
        content = list(content.values())
    return [each for part in content for each in tensors_in(part)] if isinstance(content, (list, tuple)) else []


def places(content) -> list[range]:
    """The memory of each tensor in nested content."""
    found = []
    for tensor in tensors_in(content):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it has none of its own
            found.append(range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    return found


def rows(content) -> list[str]:
    """The digests of the samples in a batch of which nothing else is known."""
    return [digest(row) for row in zip(*tensors_in(content), strict=False)]


def rows_of_inputs(inputs) -> list[str]:
    """The same for what a model is given: its tensors that have as many rows as the first one."""
    tensors = tensors_in(inputs)
    return rows([tensor for tensor in tensors if len(tensor) == len(tensors[0])])


def norm_of(recorded: torch.Tensor) -> float:
    return float(recorded[0])


def differ(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two entries, relative to the largest entry of the first tensor."""
    if one.shape != other.shape:
        return math.inf
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return 0.0
    largest = float((one - other)[differs].abs().max())
    finite = one[one.isfinite()].abs()
    scale = float(finite.max()) if len(finite) else 0.0
    return largest / (scale or 1.0) if math.isfinite(largest) else math.inf


def digest(content) -> str:
    """16 hex digits of nested tensors, arrays, images, numbers and strings; of other objects only the type counts."""
    sha = hashlib.sha256()

    def add(part) -> None:
        if isinstance(part, np.ndarray) and part.dtype.hasobject:
            part = part.tolist()  # its bytes are addresses
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().contiguous()
            sha.update(f"{part.dtype}{tuple(part.shape)}".encode())
            sha.update(part.view(torch.uint8).numpy() if part.ndim else repr(part.item()).encode())
        elif isinstance(part, np.ndarray):
            sha.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Mapping):
            for name in part:
                sha.update(repr(name).encode())
                add(part[name])
        elif isinstance(part, (list, tuple)):
            sha.update(str(len(part)).encode())
            for entry in part:
                add(entry)
        elif isinstance(part, (str, bytes, int, float, bool, type(None))):
            sha.update(repr(part).encode())
        elif hasattr(part, "tobytes"):  # an image of PIL
            sha.update(part.tobytes())
        else:
            sha.update(type(part).__qualname__.encode())

    add(content)
    return sha.hexdigest()[:16]
