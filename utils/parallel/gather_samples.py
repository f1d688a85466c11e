"""Gather the value of every sample, for metrics that are neither means nor counts."""

import torch
from accelerate import Accelerator


def gather_samples(accelerator: Accelerator, parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the (n, ...) tensors of all processes to (N, ...), in rank order; n may differ. Collective.

    Raises:
        ValueError: if a tensor requires grad: no gradient would go through.

    For example, with the package evaluate:

        metric.compute(predictions=gather_samples(accelerator, predictions), references=...)

    Accelerate's `gather_for_metrics` needs a loader that Accelerate prepared, and drops the last samples of the last
    batch on whichever rank they are.
    """
    if any(part.requires_grad for part in parts):
        raise ValueError(
            "gather_samples passes on no gradient, but a tensor requires grad: detach it, or use torch.no_grad()"
        )
    values = torch.cat(parts)
    counts = accelerator.gather(torch.tensor([len(values)], device=values.device)).tolist()
    # Not with `pad_across_processes`, which turns bools into integers, but only on the ranks that it pads.
    padded = values.new_zeros((max(counts), *values.shape[1:]))
    padded[: len(values)] = values
    padded = accelerator.gather(padded)
    return torch.cat([part[:count] for part, count in zip(padded.chunk(len(counts)), counts, strict=True)])
