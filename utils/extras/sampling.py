"""Orders of the data other than a permutation, the same on any topology: `GlobalLoader(..., order=...)`."""

import math
from collections.abc import Sequence

import torch

from ..console import stop
from ..fingerprint import digest
from ..randomness import combine
from ..sampler import GlobalSampler

Drawn = tuple[torch.Tensor, torch.Tensor]  # items and random ids, int64 (n,) each


class Weighted:
    """Draw N items with replacement in an epoch, each with a probability in proportion to its weight.

    As torch's WeightedRandomSampler does, but the same items on any topology.

    Args:
        weights: (N,), not negative.

    Raises:
        TypeError: if they are not numbers.
    """

    def __init__(self, weights: Sequence[float] | torch.Tensor):
        try:
            self.weights = torch.as_tensor(weights, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"weights must be numbers, one per item: {error}") from None

    def fit(self, num_items: int, num_used: int, batch_size: int) -> None:
        """Raises: SystemExit, if the weights do not fit `num_items` items, of which the first `num_used` are used."""
        fits = self.weights.shape == (num_items,) and bool((self.weights >= 0).all())
        if not fits or not 0 < float(self.weights[:num_used].sum()) < math.inf:
            stop(f"sampling weights must be {num_items} finite numbers, one per item, not negative, and not all 0")
        self.cumulative = self.weights[:num_used].cumsum(0)

    def __call__(
        self, sampler: GlobalSampler, epoch: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items at these positions of an epoch, and their random ids."""
        key = combine(sampler.seed, epoch)
        # 53 random bits, as many as a float64 can hold.
        bits = (combine(key, 1, positions) << 21) + (combine(key, 2, positions) >> 11)
        total = self.cumulative[-1]
        items = torch.searchsorted(self.cumulative, bits.to(torch.float64) / 2**53 * total, right=True)
        # A level that was rounded up to the sum of the weights belongs to the last item with a weight.
        return items.clamp_(max=int(torch.searchsorted(self.cumulative, total))), positions

    def resume_invariants(self) -> dict:
        return {"sampling_weights": digest(self.cumulative)}


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
