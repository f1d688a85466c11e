"""Which items each process reads: the same samples in every step on any number of processes."""

import dataclasses
import math
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from .randomness import combine


def virtual_processes(accelerator: Accelerator) -> int:
    """The value of --virtual_processes; 0: off."""
    return getattr(accelerator, "virtual_processes", 0)  # a plain Accelerator lacks it


def logical_ranks(rank: int, world_size: int, number: int, strided: bool = False) -> range:
    """The logical ranks (virtual processes), out of `number`, that process `rank` computes.

    They are consecutive, or with `strided` every world_size-th one.
    """
    if strided:
        return range(rank, number, world_size)
    return range(rank * number // world_size, (rank + 1) * number // world_size)


@dataclasses.dataclass
class MicroBatch:
    """What one process reads for one micro-batch: at least one item."""

    indices: torch.Tensor  # int64 (n,): indices into the dataset
    random_ids: torch.Tensor  # int64 (n,): seeds of the items' random numbers; the index, unless items repeat
    is_stand_in: bool  # no item is left for this micro-batch: the one it reads has weight zero
    _step_samples: int  # over all processes; private, because `losses.sum() / step_samples` would count stand-ins
    micro_step: int  # index of the micro-batch within the step on this process
    slot: int  # index of the micro-batch within the step over all processes


class GlobalSampler:
    """Assigns items to processes, for steps of `batch_size` items over all processes and accumulation steps.

    The order of an epoch is a permutation by (seed, epoch), or the dataset's with `seed=None`. Step s takes the items
    from s x batch_size on and splits them into accumulation x world_size micro-batches, whose sizes differ by at most
    one. The last step takes the items that are left; micro-batches for which there are none get a stand-in of weight
    zero. So each item is used once per epoch, every process has the same number of micro-batches, and a resumed run
    skips to any step without reading data.

    Accelerate's own sharding pads the last batch with items that were already used, or gives some processes one batch
    fewer than others, and it resumes by reading all earlier batches.

    Args:
        seed: None: dataset order.
        drop_last: skip a smaller last step, for BatchNorm, which fails on a micro-batch of one sample.
        repeats: use 1/repeats of the items per epoch, each `repeats` times within a step.
            Source: repeated augmentation, E. Hoffer et al., https://arxiv.org/abs/1901.09335.
        virtual_processes: number of micro-batches per step, instead of accumulation x world_size; each process
            computes consecutive ones, and some compute one more than others. 0: off.
        strided: with virtual processes too, each process computes every world_size-th micro-batch, as FSDP needs.
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
        strided: bool = False,
    ):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.drop_last, self.repeats, self.virtual_processes = drop_last, repeats, virtual_processes
        self.num_slots = virtual_processes or accumulation * world_size
        self.slots = logical_ranks(rank, world_size, self.num_slots, strided or not virtual_processes)
        self.accumulation = len(self.slots)

    def __len__(self) -> int:
        """Steps per epoch."""
        if self.drop_last:
            return self.length // self.batch_size
        return math.ceil(self.length / self.batch_size)

    def items(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of an epoch in order, and their random ids; both int64 (length,)."""
        positions = torch.arange(self.length)
        if self.seed is None:
            return positions, positions
        items = torch.randperm(self.length, generator=torch.Generator().manual_seed(combine(self.seed, epoch)))
        if self.repeats == 1:
            return items, items
        different = self.batch_size // self.repeats
        step, within = positions // self.batch_size, positions % self.batch_size
        items = items[step * different + within % different]
        return items, items + self.length * (within // different)  # each repeat has its own random numbers

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
