"""Which items each process reads: the same samples in every step on any number of processes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accelerate import Accelerator

from .randomness import combine


def virtual_processes(accelerator: Accelerator) -> int:
    """The number that --virtual_processes asked for; 0: none."""
    return getattr(accelerator, "virtual_processes", 0)  # an Accelerator of your own has none


def logical_ranks(rank: int, world_size: int, number: int) -> range:
    """The virtual processes, of `number`, that a process computes."""
    return range(rank * number // world_size, (rank + 1) * number // world_size)


class MicroBatch(NamedTuple):
    """What one process reads for one micro-batch: at least one item."""

    indices: torch.Tensor  # int64 (n,): the items
    random_ids: torch.Tensor  # int64 (n,): what their random numbers depend on; the item, unless items repeat
    is_stand_in: bool  # there is no item for this micro-batch: the one that is read counts nothing
    step_samples: int  # items of the whole step, over all processes and micro-batches
    micro_step: int  # number of the micro-batch within the step, on this process, from 0
    slot: int  # the same over all processes


class GlobalSampler:
    """Which items each process reads, for steps of `batch_size` items over all processes and accumulation steps.

    The order of an epoch is a permutation by (seed, epoch), or the dataset's with `seed=None`. Step s takes the items
    from s x batch_size on, cut into accumulation x world_size micro-batches of equal length (+-1; the last step of an
    epoch has what is left). Where there are fewer items than micro-batches, some get a stand-in, which counts nothing.
    So every item comes once per epoch, nothing is padded or dropped, every process has the same number of
    micro-batches, and any step is found in O(1).

    Accelerate's own sharding pads the last batch with items that were already used, or gives some processes one batch
    less than others; and it resumes by reading the batches before.

    Args:
        length: items of the dataset.
        seed: None: in the order of the dataset.
        drop_last: leave out a smaller last step, for BatchNorm, which fails on a micro-batch of one sample.
        repeats: an epoch takes 1/repeats of the items, each `repeats` times in one step, for augmentation.
            Source: repeated augmentation, E. Hoffer et al., https://arxiv.org/abs/1901.09335.
        virtual_processes: cut each step into so many micro-batches instead of accumulation x world_size;
            each process has consecutive ones, and not all have equally many. 0: off.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int | None = None,
        accumulation: int = 1,
        drop_last: bool = False,
        repeats: int = 1,
        virtual_processes: int = 0,
    ):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.drop_last, self.repeats, self.virtual_processes = drop_last, repeats, virtual_processes
        self.num_slots = virtual_processes or accumulation * world_size
        self.slots = range(rank, self.num_slots, world_size)
        if virtual_processes:
            self.slots = logical_ranks(rank, world_size, virtual_processes)
        self.accumulation = len(self.slots)

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.drop_last:
            return self.length // self.batch_size
        return math.ceil(self.length / self.batch_size)

    def items(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The items of an epoch in their order, and their random ids; both int64 (length,)."""
        positions = torch.arange(self.length)
        if self.seed is None:
            return positions, positions
        items = torch.randperm(self.length, generator=torch.Generator().manual_seed(combine(self.seed, epoch)))
        if self.repeats == 1:
            return items, items
        different = self.batch_size // self.repeats
        step, within = positions // self.batch_size, positions % self.batch_size
        items = items[step * different + within % different]
        return items, items + self.length * (within // different)  # each repeat has random numbers of its own

    def micro_batches(self, epoch: int = 0, first_step: int = 0, device="cpu") -> Iterator[MicroBatch]:
        """This process's micro-batches of an epoch, `accumulation` for each step from `first_step` on."""
        items, random_ids = (tensor.to(device) for tensor in self.items(epoch))
        for start in range(first_step * self.batch_size, len(self) * self.batch_size, self.batch_size):
            step_samples = min(self.batch_size, self.length - start)
            short, longer = divmod(step_samples, self.num_slots)  # cut as torch.tensor_split does
            for micro_step, slot in enumerate(self.slots):
                first = start + slot * short + min(slot, longer)
                size = short + (slot < longer)
                part = slice(first, first + size) if size else slice(start, start + 1)  # a stand-in
                yield MicroBatch(items[part], random_ids[part], size == 0, step_samples, micro_step, slot)
