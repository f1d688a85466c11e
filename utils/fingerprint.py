"""A digest of any content: tells whether two processes, or a run and its resume, have the same data."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch


def digest(content) -> str:
    """16 hex digits of nested tensors, arrays, images, numbers, strings, and public attributes of other objects."""
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
    elif isinstance(content, Mapping) or hasattr(content, "keys"):  # also a graph of torch_geometric
        for name in content.keys():  # noqa: SIM118
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
    elif isinstance(content, (set, frozenset)):
        update(sha, sorted(map(digest, content)))
    else:
        kind = type(content).__qualname__
        names = getattr(content, "__dataclass_fields__", None) or getattr(content, "__dict__", {})
        sha.update((kind if names or " at 0x" in repr(content) else repr(content)).encode())  # not an address
        # Private ones may be caches, handles, or lead back to the object.
        update(sha, {name: getattr(content, name) for name in names if not name.startswith("_")})
