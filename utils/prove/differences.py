"""How far two numbers or two tensors are apart; torch is imported only where it is needed."""

import math

CHUNK = 2**22  # entries of a tensor that are compared at a time, in float64


def number_difference(first: float, second: float) -> float:
    """|a - b| / max(|a|, |b|): from 0 to 2, infinite if only one is NaN or infinite, 0 if both are NaN."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not math.isfinite(first) or not math.isfinite(second):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def tensor_difference(reference, other, zero_scale: float = 0.0) -> float:
    """The largest difference of two entries, divided by the largest finite entry of `reference`, both absolute.

    Args:
        reference, other: tensors of any dtype. Infinite if their shapes differ, or if an entry is NaN or infinite
            in only one of them.
        zero_scale: what the difference is divided by where `reference` is 0 everywhere; 0: it is infinite then.
    """
    import torch

    if reference.shape != other.shape:
        return math.inf
    if torch.equal(reference, other):
        return 0.0
    largest = largest_entry = 0.0
    wide = torch.complex128 if reference.is_complex() else torch.float64
    for first, second in zip(reference.reshape(-1).split(CHUNK), other.reshape(-1).split(CHUNK), strict=True):
        if not len(first):
            continue
        first, second = first.to(wide), second.to(wide)
        finite = first.isfinite() & second.isfinite()
        if not (finite | (first == second) | (first.isnan() & second.isnan())).all():
            return math.inf
        largest = max(largest, torch.where(finite, first - second, 0.0).abs().max().item())
        largest_entry = max(largest_entry, torch.where(first.isfinite(), first, 0.0).abs().max().item())
    scale = largest_entry or zero_scale
    if largest == 0:  # also 0 and -0, or two NaN of different bits
        return 0.0
    return largest / scale if scale else math.inf


def same_bits(first, second) -> bool:
    """Whether two tensors of the same shape and dtype are equal bit for bit."""
    import torch

    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)))
