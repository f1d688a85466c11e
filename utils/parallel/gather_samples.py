"""Every sample's value on every process, once: for metrics that are neither means nor counts."""

import torch
from accelerate import Accelerator


def gather_samples(accelerator: Accelerator, parts: list[torch.Tensor]) -> torch.Tensor:
    """Each process's (n, ...) tensors as one tensor (N, ...) in the order of the ranks; n may differ. Collective.

    For metrics that are neither means nor counts, such as those of the package evaluate:

        metric.compute(predictions=gather_samples(accelerator, predictions), references=...)

    A confusion matrix is a sum of counts and needs one `accelerator.reduce` only, as in scripts/mnist_mlp.py.

    Accelerate's `gather_for_metrics` needs a loader that it prepared itself, and then drops the last samples of the
    last batch whoever holds them.
    """
    mine = torch.cat(parts)
    counts = accelerator.gather(torch.tensor([len(mine)], device=mine.device)).tolist()
    # Not by `pad_across_processes`, which makes integers of bools on those ranks that it pads.
    padded = mine.new_zeros((max(counts), *mine.shape[1:]))
    padded[: len(mine)] = mine
    padded = accelerator.gather(padded)
    return torch.cat([part[:count] for part, count in zip(padded.chunk(len(counts)), counts, strict=True)])
