"""Orders of the data other than a permutation, the same on any topology: `GlobalLoader(..., order=...)`."""

import torch

from ..sampler import GlobalSampler


class Repeated:
    """An epoch takes 1/times of the items, each `times` times in one step, for augmentation.

    Source: repeated augmentation, E. Hoffer et al., https://arxiv.org/abs/1901.09335.
    """

    def __init__(self, times: int):
        self.times = times

    def fit(self, num_items: int, num_used: int, batch_size: int) -> None:
        """Raises: ValueError, if `times` does not divide `batch_size`."""
        if batch_size % self.times:
            raise ValueError(f"the {self.times} repeats of an item must divide batch_size {batch_size}")

    def __call__(
        self, sampler: GlobalSampler, epoch: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items at these positions of an epoch, and their random ids, one for each repeat."""
        different = sampler.batch_size // self.times
        step, within = positions // sampler.batch_size, positions % sampler.batch_size
        items = sampler.permutation(epoch, step * different + within % different)
        return items, items + sampler.length * (within // different)

    def resume_invariants(self) -> dict:
        return {"repeats": self.times}
