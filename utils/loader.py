"""Batches of any map-style dataset that are the same on any number of processes, workers and
accumulation steps."""

import dataclasses
import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from . import record
from .console import is_local_main, show, stop
from .randomness import (
    combine,
    first_draws,
    generators_restored,
    random_normal,
    random_uniform,
    seed_generators,
    shuffle,
)
from .signals import end_with_parent
from .virtual_processes import leaves_of, virtual_processes

# Up to here the order of an epoch is one torch.randperm; longer ones are computed in parts of CHUNK
# items.
MAX_PERMUTATION = 2**20
CHUNK = 2**16
# Set apart what collate_fn draws from what the items draw.
COLLATE = 1


class UnreadableItem(ValueError):
    """Raised by a dataset for an item that cannot be read: its message ends the run, without a
    traceback."""


class Piece(NamedTuple):
    """What one process reads for one micro-batch."""

    indices: torch.Tensor  # int64 (n,): the items
    draws: (
        torch.Tensor
    )  # int64 (n,): what their random numbers depend on; the item, unless items repeat
    update_size: int  # items of the whole update, over all processes and micro-batches
    micro_step: int  # 0 to accumulation - 1
    part: int  # number of the piece in the update, over all processes


class GlobalSampler:
    """Which items each process reads, for updates of `batch_size` items over all processes and
    accumulation steps.

    The order of an epoch is a permutation by (seed, epoch), or that of the dataset with
    `seed=None`. Update s takes items s x batch_size and following of it, cut into accumulation x
    world_size pieces of equal length (+-1; the last update of an epoch has what is left, and a
    piece of it may be empty). So every item comes once an epoch, nothing is padded or dropped,
    every process has the same number of micro-batches, and any update is found in O(1).

    Accelerate's own sharding pads the last batch with items that were already used, or gives some
    processes one batch less than others; and it resumes by reading the batches before.

    drop_last: leave out a smaller last update, for BatchNorm, which fails on a piece of one sample.
    repeats: an epoch takes 1/repeats of the items, each `repeats` times in one update. Source:
    repeated augmentation, E. Hoffer et al., https://arxiv.org/abs/1901.09335.
    sampling_weights: (N,), not negative. Draw N items with replacement in an epoch, each with a
    probability in proportion to its weight, as torch's WeightedRandomSampler does, but the same
    draws on any topology.
    virtual_processes: cut each update into so many pieces instead of accumulation x world_size;
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
        sampling_weights: Sequence[float] | torch.Tensor | None = None,
        virtual_processes: int = 0,
    ):
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.virtual_processes = virtual_processes
        if virtual_processes:
            self.num_parts = virtual_processes
            self.parts = leaves_of(rank, world_size, virtual_processes)
        else:
            self.num_parts = accumulation * world_size
            self.parts = range(rank, self.num_parts, world_size)
        self.accumulation = len(self.parts)
        self.drop_last = drop_last
        self.repeats = repeats
        self.cumulative_weights = None
        if sampling_weights is not None:
            self.cumulative_weights = torch.as_tensor(sampling_weights, dtype=torch.float64).cumsum(
                0
            )
        self._permutation = (None, None)

    def __len__(self) -> int:
        """Updates an epoch."""
        if self.drop_last:
            return self.length // self.batch_size
        return math.ceil(self.length / self.batch_size)

    def items(
        self, epoch: int, first: int = 0, last: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The items at positions first to last - 1 of an epoch's order, and their draws; both int64
        (last - first,)."""
        positions = torch.arange(first, self.length if last is None else min(last, self.length))
        if self.seed is None:
            return positions, positions
        key = combine(self.seed, epoch)
        if self.cumulative_weights is not None:
            # 53 random bits, as many as a float64 can hold.
            bits = (combine(key, 1, positions) << 21) + (combine(key, 2, positions) >> 11)
            levels = bits.to(torch.float64) / 2**53 * self.cumulative_weights[-1]
            items = torch.searchsorted(self.cumulative_weights, levels, right=True)
            # A level that was rounded up to the sum of the weights belongs to the last item with a
            # weight.
            last_item = int(
                torch.searchsorted(self.cumulative_weights, self.cumulative_weights[-1])
            )
            return items.clamp_(max=last_item), positions
        repetition = 0
        if self.repeats > 1:
            different = self.batch_size // self.repeats
            update = positions // self.batch_size
            within = positions % self.batch_size
            repetition = within // different
            positions = update * different + within % different
        if self.length > MAX_PERMUTATION:
            items = shuffle(positions, self.length, key)
        else:
            items = self._epoch_permutation(epoch, key)[positions]
        return items, items + self.length * repetition

    def _epoch_permutation(self, epoch: int, key: int) -> torch.Tensor:
        if self._permutation[0] != epoch:
            generator = torch.Generator().manual_seed(key)
            self._permutation = (epoch, torch.randperm(self.length, generator=generator))
        return self._permutation[1]

    def pieces(
        self, epoch: int = 0, first_update: int = 0, device: torch.device | None = None
    ) -> Iterator[Piece]:
        """This process's pieces of an epoch, `accumulation` for each update from `first_update`
        on."""
        updates_per_chunk = (
            len(self) if self.length <= MAX_PERMUTATION else math.ceil(CHUNK / self.batch_size)
        )
        for start in range(first_update, len(self), max(updates_per_chunk, 1)):
            end = min(start + updates_per_chunk, len(self))
            items, draws = self.items(epoch, start * self.batch_size, end * self.batch_size)
            if device is not None:
                items = items.to(device)
                draws = (
                    items
                    if self.repeats == 1 and self.cumulative_weights is None
                    else draws.to(device)
                )
            for first in range(0, len(items), self.batch_size):
                update = items[first : first + self.batch_size]
                update_draws = draws[first : first + self.batch_size]
                for micro_step, part in enumerate(self.parts):
                    place = self._place(len(update), part)
                    yield Piece(update[place], update_draws[place], len(update), micro_step, part)

    def _place(self, size: int, part: int) -> slice:
        """Where a piece lies in an update of `size` items, cut as torch.tensor_split does."""
        short, longer = divmod(size, self.num_parts)
        start = part * short + min(part, longer)
        return slice(start, start + short + (part < longer))


@dataclasses.dataclass(slots=True)
class Batch:
    """One process's part of one micro-batch."""

    data: Any  # what the dataset and collate_fn make of the items, on the accelerator's device
    indices: torch.Tensor  # int64 (n,): which items these are; the same numbers on any topology
    weights: torch.Tensor | None  # (n,): what each sample counts in means; None: all count alike
    update_size: int  # samples of the whole update, over all processes and micro-batches
    update_weight: int | torch.Tensor  # the sum of its weights
    micro_step: int  # number of this micro-batch within the update, on this process, from 0
    part: int  # the same over all processes
    divided_by: int  # what DDP and accelerator.backward will divide its gradient by
    draws: torch.Tensor
    key: int
    digests: list[str] | None = None  # of the items' contents, where the run is recorded

    def __len__(self) -> int:
        return len(self.indices)

    def mean_over_update(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean loss of the update, for `accelerator.backward`.

        losses: (n,), one a sample. With weights, the mean is sum(weights * losses) / sum(weights).

        DDP divides gradients by the number of processes, and accelerator.backward divides by the
        accumulation steps. Both are right only where all parts of an update are equally large. So
        the sum of the losses is multiplied by both numbers, and divided by the samples (the weight)
        of the whole update. With virtual processes nothing divides.
        """
        if losses.shape != self.indices.shape:
            raise ValueError(
                f"mean_over_update takes one loss a sample, shape ({len(self)},), and got "
                f"{tuple(losses.shape)}: "
                'compute the loss with reduction="none"'
            )
        if self.weights is None:
            return losses.sum() * (self.divided_by / self.update_size)
        total = (losses * self.weights).sum()
        return total * self.divided_by / self.update_weight.to(losses.dtype)

    def rand(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Uniform numbers in [0, 1), float32 (n, *shape): a function of (seed, epoch, sample), on
        any topology.

        For dropout, noise and augmentation in the training loop. stream: another number for every
        other use.
        """
        return random_uniform(combine(self.key, stream), self.draws, shape)

    def randn(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers, float32 (n, *shape), as `rand`."""
        return random_normal(combine(self.key, stream), self.draws, shape)


class GlobalLoader:
    """The batches of a map-style dataset, the same samples in every update on any topology.

    dataset: a torch.utils.data.Dataset, a datasets.Dataset, a list: anything with __len__ and
    __getitem__. A TensorDataset is moved to the accelerator's device once, and indexed there.
    batch_size: of one optimizer update, over all processes and accumulation steps together.
    seed: shuffle by (seed, epoch), for training; None: in the order of the dataset, without
    accumulation, for tests.
    collate_fn: makes a batch of a list of items; None: torch's default_collate.
    num_workers: processes that read items ahead of the training; 0: this process reads them.
    loss_weights: a function of a batch's data, that returns what each sample counts, (n,): tokens
    that are no padding, for instance. The sum over the update is then known before its first
    backward pass.
    deterministic: promise that neither items nor collate_fn draw random numbers; None: what an
    attribute of that name of the dataset says, else unknown.
    max_samples: take the first ones only.
    shard: (rank, world size), where not every process takes samples of its own; None: the
    accelerator's.
    accumulation: micro-batches of an update on each process; None: the accelerator's in training, 1
    in tests. Virtual processes decide it otherwise.
    drop_last, repeats, sampling_weights: see GlobalSampler.

    Before an item is read, the global generators of torch, Python and NumPy are seeded by (seed,
    epoch, item): what an augmentation draws from them does not depend on processes, workers or a
    resume. Before collate_fn they are seeded by the batch's first item: what it draws is the same
    with any number of workers and after a resume, but not on another number of processes or
    accumulation steps, which cut other batches. Whole batches are asked for (torch's __getitems__)
    where the dataset has that and draws nothing. A process without a sample of the last update gets
    a batch of length 0, with tensors of the right shapes.

    Raises: SystemExit, in one sentence, if the dataset is not map-style, empty, or smaller than a
    dropped batch, or if the sampling weights do not fit. ValueError if options contradict each
    other.
    """

    def __init__(
        self,
        dataset,
        batch_size: int,
        accelerator: Accelerator,
        *,
        seed: int | None = None,
        collate_fn: Callable | None = None,
        num_workers: int = 0,
        loss_weights: Callable[[Any], torch.Tensor] | None = None,
        deterministic: bool | None = None,
        max_samples: int | None = None,
        shard: tuple[int, int] | None = None,
        accumulation: int | None = None,
        drop_last: bool = False,
        repeats: int = 1,
        sampling_weights: Sequence[float] | torch.Tensor | None = None,
    ):
        check_dataset(dataset)
        asked = record.settings()
        if asked is not None:
            batch_size = asked.batch_size
            max_samples = asked.train_items if seed is not None else asked.test_items
            num_workers = num_workers if asked.num_workers is None else asked.num_workers
        length = min(len(dataset), max_samples or len(dataset))
        if sampling_weights is not None:
            check_sampling_weights(sampling_weights, len(dataset), length)
            sampling_weights = sampling_weights[:length]
        check_options(batch_size, seed, sampling_weights, repeats, loss_weights, shard)
        self.dataset = dataset
        self.accelerator = accelerator
        self.loss_weights = loss_weights
        if accumulation is None:
            accumulation = 1 if seed is None else accelerator.gradient_accumulation_steps
        rank, world_size = shard or (accelerator.process_index, accelerator.num_processes)
        self.sampler = GlobalSampler(
            length,
            batch_size,
            rank,
            world_size,
            seed=seed,
            accumulation=accumulation,
            drop_last=drop_last,
            repeats=repeats,
            sampling_weights=sampling_weights,
            virtual_processes=virtual_processes(accelerator),
        )
        if len(self) == 0:
            stop(
                f"--batch_size {batch_size} is more than the {length} items of the training set: "
                "take a smaller one"
            )
        self.recorded = asked is not None
        self.tensors = None
        if gives_its_tensors(dataset) and collate_fn is None:
            self.tensors = [tensor.to(accelerator.device) for tensor in dataset.tensors]
        self.reader = ItemReader(dataset, collate_fn or default_collate, seed or 0, deterministic)
        self.num_workers = 0 if self.tensors else num_workers
        self._requests = Requests()
        self._workers = None

    def __len__(self) -> int:
        """Updates an epoch."""
        return len(self.sampler)

    @property
    def num_samples(self) -> int:
        """Samples an epoch, over all processes."""
        return min(self.sampler.length, len(self) * self.sampler.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def epoch(self, epoch: int = 0, first_update: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from update `first_update` on. Collective if
        `loss_weights` is set."""
        divided_by = 1 if self.sampler.virtual_processes else self.sampler.num_parts
        key = combine(self.sampler.seed or 0, epoch, 3)
        window = []
        for piece, data in self._read(epoch, first_update):
            batch = Batch(
                data=data,
                indices=piece.indices,
                weights=None,
                update_size=piece.update_size,
                update_weight=piece.update_size,
                micro_step=piece.micro_step,
                part=piece.part,
                divided_by=divided_by,
                draws=piece.draws,
                key=key,
            )
            if self.recorded:
                batch.data, batch.digests = data
            if self.loss_weights is None:
                yield batch
                continue
            batch.weights = self._weigh(batch)
            window.append(batch)
            if len(window) == self.sampler.accumulation:
                # Apple GPUs have no float64.
                wide = torch.float32 if batch.weights.device.type == "mps" else torch.float64
                sums = torch.zeros(self.sampler.num_parts, dtype=wide, device=batch.weights.device)
                for each in window:
                    sums[each.part] = each.weights.to(wide).sum()
                # A sum for each part, so that their order is the same on any number of processes.
                total = self.accelerator.reduce(sums, "sum").sum()
                for each in window:
                    each.update_weight = total.clamp(min=torch.finfo(torch.float32).tiny)
                yield from window
                window = []

    def _weigh(self, batch: Batch) -> torch.Tensor:
        weights = self.loss_weights(batch.data)
        if weights.shape != batch.indices.shape:
            raise ValueError(
                f"loss_weights must return one weight a sample, shape ({len(batch)},), and "
                f"returned {tuple(weights.shape)}"
            )
        return weights if weights.is_floating_point() else weights.float()

    def _read(self, epoch: int, first_update: int) -> Iterator[tuple[Piece, Any]]:
        device = self.accelerator.device
        if self.tensors:
            for piece in self.sampler.pieces(epoch, first_update, device):
                # index_select copies whole items: 5 times faster than images[indices]
                data = [tensor.index_select(0, piece.indices) for tensor in self.tensors]
                if self.recorded:
                    data = data, [digest(item) for item in zip(*data, strict=True)]
                yield piece, data
            return
        pieces, requested = itertools.tee(self.sampler.pieces(epoch, first_update))
        requests = ((epoch, piece.indices.tolist(), piece.draws.tolist()) for piece in requested)
        try:
            for piece, data in zip(pieces, self._answers(requests), strict=True):
                if device.type != "cpu":
                    # Not blocking: from pinned memory, the GPU copies while the CPU goes on.
                    data = send_to_device(data, device, non_blocking=True)
                    indices, draws = (tensor.to(device, non_blocking=True) for tensor in piece[:2])
                    piece = piece._replace(indices=indices, draws=draws)
                yield piece, data
        except UnreadableItem as error:
            stop_at_unreadable_item(error)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            reason = str(error).splitlines()[0].rstrip(". ")
            stop(f"{reason}: if memory ran out, take fewer --num_workers", alone=True)

    def _answers(self, requests: Iterator) -> Iterator:
        if self.num_workers == 0:
            return map(self.reader.read_and_restore, requests)
        if self._workers is None:
            self._workers = DataLoader(
                self.reader,
                batch_sampler=self._requests,
                collate_fn=as_it_is,
                num_workers=self.num_workers,
                worker_init_fn=end_with_parent,
                persistent_workers=True,
                pin_memory=self.accelerator.device.type == "cuda",
                # Without one, DataLoader draws from the global generator in every epoch.
                generator=torch.Generator(),
                # Memory-mapped tables and datasets that cannot be pickled are shared by a fork.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )
        self._requests.source = requests
        return iter(self._workers)

    def describe(self) -> dict:
        """What identifies the data: compared between processes, and between a run and its
        resume."""
        try:
            return {"items": self.sampler.length, "fingerprint": self.reader.fingerprint()}
        except UnreadableItem as error:
            stop_at_unreadable_item(error)

    def fixed_facts(self) -> dict:
        """What must not change between a run and its resume, besides the data."""
        sampler = self.sampler
        facts = {
            "batch_size": sampler.batch_size,
            "seed": sampler.seed,
            "steps_per_epoch": len(self),
        }
        facts |= {"drop_last": sampler.drop_last, "repeats": sampler.repeats}
        if sampler.cumulative_weights is not None:
            facts["sampling_weights"] = digest(sampler.cumulative_weights)
        if sampler.virtual_processes:
            facts["virtual_processes"] = sampler.virtual_processes
        return facts


class Requests:
    """A batch sampler whose requests are set anew for every epoch, while the workers live on."""

    source: Iterator = iter(())

    def __iter__(self) -> Iterator:
        return self.source


def as_it_is(batch):
    return batch


class ItemReader(Dataset):
    """Reads the items of a request, in this process or in a worker."""

    def __init__(self, dataset, collate_fn: Callable, seed: int, deterministic: bool | None):
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        if deterministic is None:
            deterministic = getattr(
                dataset,
                "deterministic",
                gives_its_tensors(dataset) and collate_fn is default_collate,
            )
        self.deterministic = deterministic
        self.whole_batches = hasattr(dataset, "__getitems__")
        self._empty = None

    def __getitems__(self, request: tuple[int, list[int], list[int]]):
        """The batch of a request (epoch, items, draws)."""
        epoch, indices, draws = request
        recorded = record.settings() is not None
        if not indices:
            return (self._empty_batch(), []) if recorded else self._empty_batch()
        items = self._items(epoch, indices, draws)
        if not self.deterministic:
            seed_generators(combine(self.seed, epoch, draws[0], COLLATE))
        if recorded:
            return self.collate_fn(items), [digest(item) for item in items]
        return self.collate_fn(items)

    def read_and_restore(self, request):
        """`__getitems__` in a process that goes on with its own random numbers afterwards."""
        if self.deterministic:
            return self.__getitems__(request)
        with generators_restored():
            return self.__getitems__(request)

    def _items(self, epoch: int, indices: list[int], draws: list[int]) -> list:
        if self.whole_batches:
            if self.deterministic:
                return self.dataset.__getitems__(indices)
            # Not known whether it draws random numbers: if the generators are where they were, it
            # did not.
            seed_generators(0)
            expected = first_draws()
            seed_generators(0)
            items = self.dataset.__getitems__(indices)
            if first_draws() == expected:
                return items
            self.whole_batches = False
        if self.deterministic:
            return [self.dataset[index] for index in indices]
        items = []
        for index, draw in zip(indices, draws, strict=True):
            seed_generators(combine(self.seed, epoch, draw))
            items.append(self.dataset[index])
        return items

    def _empty_batch(self):
        """A batch without samples: item 0's, with everything that grows with the samples cut to
        none."""
        if self._empty is None:
            (item,) = self._items(0, [0], [0])
            self._empty = without_samples(self.collate_fn([item]), self.collate_fn([item, item]))
        return self._empty

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint` if it has one, else a digest: of all tensors, or of the
        first and last item.

        Warns where an item is another one when it is read again: it draws from a generator that is
        not seeded here.
        """
        own = getattr(self.dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        if gives_its_tensors(self.dataset):
            return digest(self.dataset.tensors)
        ends = sorted({0, len(self.dataset) - 1})
        with generators_restored():
            twice = [digest(self._items(0, ends, ends)) for _ in range(2)]
        if twice[0] == twice[1]:
            return twice[0]
        if is_local_main():
            show(
                f"warning: item {ends[0]} or {ends[-1]} of the dataset differs when it is read "
                "again: it draws from a generator of its own, so other processes, workers or a "
                "resume will train on other data; draw from torch's, Python's or NumPy's global "
                "generator instead",
                "yellow",
            )
        return "differs"


def gives_its_tensors(dataset) -> bool:
    """Whether the items are slices of `dataset.tensors`: a TensorDataset, and no subclass that
    changes the items."""
    kind = type(dataset)
    is_plain = getattr(kind, "__getitem__", None) is TensorDataset.__getitem__
    return isinstance(dataset, TensorDataset) and is_plain and not hasattr(dataset, "__getitems__")


def stop_at_unreadable_item(error: UnreadableItem) -> NoReturn:
    """Raises: SystemExit, with the error's message, the last line of it if the error comes from a
    worker.

    A worker's error has the worker's traceback in front of it.
    """
    stop(str(error).strip().splitlines()[-1].rpartition("UnreadableItem: ")[2], alone=True)


def check_dataset(dataset) -> None:
    """Raises: SystemExit, in one sentence, if `dataset` is not map-style or has no items."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        stop(
            f"the dataset is a {kind}, which cannot be read by item number: the order of the data "
            "could not be the same "
            "on another number of processes, nor be resumed; take a map-style dataset (__len__ and "
            "__getitem__), for "
            "instance list(dataset) or datasets.Dataset.from_generator"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, itertools.islice(dataset, 5)))
        stop(
            f"the dataset is a {kind} with {names or 'nothing in it'}: pass one of its parts, such "
            "as data['train']"
        )
    if len(dataset) == 0:
        stop(f"the dataset, a {kind}, has no items")


def check_sampling_weights(sampling_weights, length: int, used: int) -> None:
    """Raises: SystemExit, in one sentence, if they are not `length` numbers, or the first `used`
    ones are no weights."""
    weights = torch.as_tensor(sampling_weights, dtype=torch.float64)
    fits = weights.shape == (length,)
    if not fits or not bool((weights >= 0).all()) or not 0 < float(weights[:used].sum()) < math.inf:
        stop(
            f"sampling_weights must be {length} finite numbers, one an item, not negative, and not "
            "all 0"
        )


def check_options(
    batch_size: int, seed, sampling_weights, repeats: int, loss_weights, shard
) -> None:
    """Raises: ValueError, in one sentence, if options of a GlobalLoader contradict each other."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, and is {batch_size}")
    if seed is None and (sampling_weights is not None or repeats > 1):
        raise ValueError(
            "sampling_weights and repeats need a seed: without one the order is that of the dataset"
        )
    if sampling_weights is not None and repeats > 1:
        raise ValueError(
            "sampling_weights and repeats cannot be combined: a weighted draw repeats items anyway"
        )
    if batch_size % repeats:
        raise ValueError(f"repeats must divide batch_size {batch_size}, and is {repeats}")
    if loss_weights is not None and shard is not None:
        raise ValueError(
            "loss_weights cannot be combined with shard: samples would count once a process"
        )


def without_samples(one, two):
    """`one`, a batch of one sample, cut to none; `two` is the same sample twice, and shows what
    grows with samples."""
    if isinstance(one, torch.Tensor):
        for dimension, (size, twice) in enumerate(zip(one.shape, two.shape, strict=True)):
            if size != twice:
                one = one.narrow(dimension, 0, 0)
        return one
    if isinstance(one, Mapping):
        return type(one)({name: without_samples(one[name], two[name]) for name in one})
    if isinstance(one, np.ndarray):
        return without_samples(torch.from_numpy(one), torch.from_numpy(two)).numpy()
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return one[:0]
        parts = [without_samples(*pair) for pair in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


def digest(content) -> str:
    """16 hex digits of nested tensors, arrays, images, numbers and strings; other objects count by
    their type."""
    sha = hashlib.sha256()

    def add(part):
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().contiguous()
            sha.update(f"{part.dtype}{tuple(part.shape)}".encode())
            sha.update(part.view(torch.uint8).numpy() if part.ndim else repr(part.item()).encode())
        elif isinstance(part, np.ndarray) and part.dtype.hasobject:
            add(part.tolist())  # its bytes are addresses
        elif isinstance(part, np.ndarray):
            sha.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Mapping):
            for name in part:
                sha.update(repr(name).encode())
                add(part[name])
        elif isinstance(part, (list, tuple)):
            sha.update(str(len(part)).encode())
            for each in part:
                add(each)
        elif isinstance(part, (str, bytes, int, float, bool, type(None))):
            sha.update(repr(part).encode())
        elif hasattr(part, "tobytes"):  # an image of PIL
            sha.update(part.tobytes())
        else:
            sha.update(type(part).__qualname__.encode())

    add(content)
    return sha.hexdigest()[:16]
