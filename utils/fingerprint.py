"""A digest of any content: tells whether two processes, or a run and its resume, have the same data."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch


def digest(content) -> str:
    """16 hex digits of nested tensors, arrays, images, numbers and strings; other objects count by their type."""
    sha = hashlib.sha256()

    def add(part):
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
            for each in part:
                add(each)
        elif isinstance(part, (str, bytes, int, float, bool, type(None))):
            sha.update(repr(part).encode())
        elif hasattr(part, "tobytes"):  # an image of PIL
            sha.update(part.tobytes())
        else:
            sha.update(type(part).__qualname__.encode())

    add(content)
    return sha.hexdigest()[:16]
