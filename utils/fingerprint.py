"""A digest of any content: tells whether two processes, or a run and its resume, have the same data."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch


def digest(content) -> str:
    """16 hex digits of nested tensors, arrays, images, numbers and strings; other objects count by their type."""
    sha = hashlib.sha256()
    update(sha, content)
    return sha.hexdigest()[:16]


def update(sha, content) -> None:
    if isinstance(content, np.ndarray) and content.dtype.hasobject:
        content = content.tolist()  # its bytes are addresses
    if isinstance(content, torch.Tensor):
        sha.update(f"{content.dtype}{tuple(content.shape)}".encode())
        flat = content.detach().cpu().flatten().view(torch.uint8)  # NumPy has no bfloat16
        sha.update(flat.numpy() if content.ndim else repr(content.item()).encode())
    elif isinstance(content, np.ndarray):
        sha.update(f"{content.dtype}{content.shape}".encode() + content.tobytes())
    elif isinstance(content, Mapping):
        for name in content:
            sha.update(repr(name).encode())
            update(sha, content[name])
    elif isinstance(content, (list, tuple)):
        sha.update(f"{len(content)}(".encode())
        for part in content:
            update(sha, part)
    elif isinstance(content, (str, bytes, int, float, bool, type(None))):
        sha.update(f"{content!r},".encode())
    elif hasattr(content, "tobytes"):  # an image of PIL
        sha.update(content.tobytes())
    else:
        sha.update(type(content).__qualname__.encode())
