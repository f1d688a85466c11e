"""Gather the value of every sample, for metrics that are neither means nor counts."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


def gather_samples(accelerator: Accelerator, parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the (n, ...) tensors of all processes to (N, ...), in rank order; n may differ. Collective.

    Raises:
        ValueError: if a tensor requires grad: no gradient would go through.

    Accelerate's `gather_for_metrics` needs a loader that Accelerate prepared, and drops the last samples of the last
    batch on whichever rank they are.
    """
    if any(part.requires_grad for part in parts):
        raise ValueError(
            "gather_samples passes on no gradient, but a tensor requires grad: detach it, or use torch.no_grad()"
        )
    return torch.cat([part.to(accelerator.device) for part in gather_object([torch.cat(parts).cpu()])])
