"""Which items each process reads: the same samples in every step on any number of processes."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from .console import stop
from .layout import Layout
from .randomness import combine, generators_restored, seed_generators


@dataclasses.dataclass
class MicroBatch:
    """What one process reads for one micro-batch: at least one item."""

    indices: torch.Tensor  # int64 (n,): indices into the dataset
    random_ids: torch.Tensor  # int64 (n,): seeds of the items' random numbers: the index; with `order`, the position
    is_stand_in: bool  # no item is left for this micro-batch: the one it reads has weight zero
    _step_samples: int  # over all processes; private, because `losses.sum() / step_samples` would count stand-ins
    micro_step: int  # index of the micro-batch within the step on this process
    slot: int  # index of the micro-batch within the step over all processes


class GlobalSampler:
    """Assigns items to processes, for steps of `batch_size` items over all processes and accumulation steps.

    The order of an epoch is a permutation by (seed, epoch), the dataset's with `seed=None`, or that of `order`. Step s
    takes the items from s x batch_size on and splits them into the micro-batches of the layout, whose sizes differ by
    at most one. The last step takes the items that are left; micro-batches for which there are none get a
    stand-in of weight zero. So each item is used once per epoch, every process has the same number of micro-batches,
    and a resumed run skips to any step without reading data.

    Accelerate's own sharding pads the last batch with items that were already used, or gives some processes one batch
    fewer than others, and it resumes by reading all earlier batches.

    Args:
        layout: None: one process.
        seed: None: dataset order.
        drop_last: skip a smaller last step, for BatchNorm, which fails on a micro-batch of one sample.
        order: function of the epoch that returns the indices of its items in order; see GlobalLoader.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        layout: Layout | None = None,
        *,
        seed: int | None = None,
        drop_last: bool = False,
        order: Callable[[int], torch.Tensor] | None = None,
    ):
        self.dataset_length, self.batch_size, self.seed = length, batch_size, seed
        self.drop_last, self.order = drop_last, order
        self.length = length if order is None else None  # items per epoch
        if order is not None:
            self.length = len(self.items(0)[0])
            # A generator of its own would begin anew when resuming, and repeat the first epochs.
            if not torch.equal(self.items(0)[0], self.items(0)[0]):
                stop("order(0) differs when called twice: draw from the global generators of torch, Python or NumPy")
        layout = layout or Layout()
        self.num_slots, self.slots = layout.num_slots, layout.slots()
        self.accumulation = len(self.slots)

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.drop_last:
            return self.length // self.batch_size
        return math.ceil(self.length / self.batch_size)

    def items(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of an epoch in order, and their random ids; both int64 (length,)."""
        if self.order is None:
            if self.seed is None:
                items = torch.arange(self.length)
            else:
                items = torch.randperm(self.length, generator=torch.Generator().manual_seed(combine(self.seed, epoch)))
            return items, items  # one tensor: 8 bytes per item
        with generators_restored():
            seed_generators(combine(self.seed or 0, epoch))
            items = torch.as_tensor(self.order(epoch))
        wanted, count = (self.length or max(items.numel(), 1),), self.dataset_length
        if items.dtype != torch.int64 or items.shape != wanted or not (0 <= items.min() <= items.max() < count):
            stop(
                f"order({epoch}) must return indices from 0 to {count - 1}, int64 of shape {wanted}, as many in each "
                f"epoch, but returned {items.dtype} of shape {tuple(items.shape)}: {items.tolist()!s:.100}"
            )
        return items, torch.arange(len(items))

    def micro_batches(self, epoch: int = 0, first_step: int = 0, device="cpu") -> Iterator[MicroBatch]:
        """This process's micro-batches of an epoch, `accumulation` per step, from `first_step` on."""
        items, random_ids = (tensor.to(device) for tensor in self.items(epoch))
        for start in range(first_step * self.batch_size, len(self) * self.batch_size, self.batch_size):
            step_samples = min(self.batch_size, self.length - start)
            short, longer = divmod(step_samples, self.num_slots)  # cut as torch.tensor_split does
            for micro_step, slot in enumerate(self.slots):
                first = start + slot * short + min(slot, longer)
                size = short + (slot < longer)
                part = slice(first, first + size) if size else slice(start, start + 1)  # a stand-in
                yield MicroBatch(items[part], random_ids[part], size == 0, step_samples, micro_step, slot)
