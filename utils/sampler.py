"""Which items each process reads: the same samples in every step on any number of processes."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from accelerate import Accelerator

from .randomness import combine, shuffle

MAX_PERMUTATION = 2**20  # up to here the order of an epoch is one torch.randperm, from here on computed when needed
CHUNK = 2**16  # items whose places are looked up at once


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
        order: a function of (sampler, epoch, positions) in place of a permutation: see extras/sampling.py.
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
        order: Callable | None = None,
        virtual_processes: int = 0,
    ):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.drop_last, self.order, self.virtual_processes = drop_last, order, virtual_processes
        self.num_slots = virtual_processes or accumulation * world_size
        self.slots = range(rank, self.num_slots, world_size)
        if virtual_processes:
            self.slots = logical_ranks(rank, world_size, virtual_processes)
        self.accumulation = len(self.slots)
        self._permutation = (None, None)

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.drop_last:
            return self.length // self.batch_size
        return math.ceil(self.length / self.batch_size)

    def items(self, epoch: int, first: int = 0, last: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The items at positions first to last - 1 of an epoch, and their random ids; both int64 (last - first,)."""
        positions = torch.arange(first, self.length if last is None else min(last, self.length))
        if self.seed is None:
            return positions, positions
        if self.order is not None:
            return self.order(self, epoch, positions)
        items = self.permutation(epoch, positions)
        return items, items

    def permutation(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """The items at these positions of an epoch's permutation; int64 (n,)."""
        key = combine(self.seed, epoch)
        if self.length > MAX_PERMUTATION:
            return shuffle(positions, self.length, key)
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(key)
            self._permutation = (epoch, torch.randperm(self.length, generator=generator))
        return self._permutation[1][positions]

    def micro_batches(self, epoch: int = 0, first_step: int = 0, device="cpu") -> Iterator[MicroBatch]:
        """This process's micro-batches of an epoch, `accumulation` for each step from `first_step` on."""
        steps_per_chunk = math.ceil(CHUNK / self.batch_size)
        for start in range(first_step, len(self), steps_per_chunk):
            end = min(start + steps_per_chunk, len(self))
            chunk = self.items(epoch, start * self.batch_size, end * self.batch_size)
            parts = (tensor.to(device).split(self.batch_size) for tensor in chunk)
            for items, random_ids in zip(*parts, strict=True):
                short, longer = divmod(len(items), self.num_slots)  # cut as torch.tensor_split does
                for micro_step, slot in enumerate(self.slots):
                    first = slot * short + min(slot, longer)
                    size = short + (slot < longer)
                    place = slice(first, first + size) if size else slice(0, 1)  # a stand-in
                    yield MicroBatch(items[place], random_ids[place], size == 0, len(items), micro_step, slot)
