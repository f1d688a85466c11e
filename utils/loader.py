"""Batches of any map-style dataset that are the same on any number of processes, workers and
accumulation steps."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from .console import is_local_main, show, stop
from .fingerprint import digest
from .randomness import (
    combine,
    first_draws,
    generators_restored,
    random_normal,
    random_uniform,
    seed_generators,
)
from .sampler import GlobalSampler, MicroBatch, virtual_processes
from .signals import end_with_parent

# Set apart what collate_fn draws from what the items draw.
COLLATE = 1


class UnreadableItem(ValueError):
    """Raised by a dataset for an item that cannot be read: its message ends the run, without a
    traceback."""


@dataclasses.dataclass(slots=True)
class Batch:
    """One micro-batch of one process: n samples, at least one.

    Where the last step of an epoch has fewer samples than micro-batches, some processes have none. They get a
    stand-in: one real sample, which counts nothing. No model has to know what to do without a sample.
    """

    data: Any  # what the dataset and collate_fn make of the items, on the accelerator's device
    indices: torch.Tensor  # int64 (n,): which items these are; the same numbers on any topology
    weights: torch.Tensor | None  # (n,): what each sample counts in means; None: all count alike
    is_stand_in: bool
    step_samples: int  # samples of the whole step, over all processes and micro-batches
    step_weight: int | torch.Tensor  # the sum of its weights
    micro_step: int  # number of this micro-batch within the step, on this process, from 0
    slot: int  # the same over all processes
    grad_divisor: int  # what DDP and accelerator.backward will divide its gradient by
    random_ids: torch.Tensor
    key: int

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """The values (n, ...) of the samples that count: all of them, or none (0, ...) of a stand-in.

        For what you gather yourself; `mean_loss` and metrics do it themselves.
        """
        return values[:0] if self.is_stand_in else values

    def mean_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean loss of the step, for `accelerator.backward`.

        Args:
            losses: (n,), one per sample. With weights, the mean is sum(weights * losses) / sum(weights).
                Or a scalar, from a model that returns nothing else: the mean over this micro-batch, by the
                same weights. That is exact if the model averages over samples, or over what `loss_weights`
                counts (tokens that are no padding, for a language model).

        DDP divides gradients by the number of processes, and accelerator.backward divides by the
        accumulation steps. Both are right only where all parts of a step are equally large. So
        the sum of the losses is multiplied by both numbers, and divided by the samples (the weight)
        of the whole step. With virtual processes nothing divides.
        """
        if losses.ndim == 0:
            losses = losses.expand(len(self))
        if losses.shape != self.indices.shape:
            raise ValueError(
                f"mean_loss takes one loss per sample, shape ({len(self)},), or their mean, shape (), and got "
                f"{tuple(losses.shape)}"
            )
        losses = self.counted(losses)
        if self.weights is None:
            return losses.sum() * (self.grad_divisor / self.step_samples)
        total = (losses * self.counted(self.weights)).sum()
        return total * self.grad_divisor / self.step_weight.to(losses.dtype)

    def rand(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Uniform numbers in [0, 1), float32 (n, *shape): a function of (seed, epoch, sample), on
        any topology.

        For dropout, noise and augmentation in the training loop. stream: another number for every
        other use.
        """
        return random_uniform(combine(self.key, stream), self.random_ids, shape)

    def randn(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers, float32 (n, *shape), as `rand`."""
        return random_normal(combine(self.key, stream), self.random_ids, shape)


class GlobalLoader:
    """The batches of a map-style dataset, the same samples in every step on any topology.

    Before an item is read, the global generators of torch, Python and NumPy are seeded by (seed,
    epoch, item): what an augmentation draws from them does not depend on processes, workers or a
    resume. Before collate_fn they are seeded by the batch's first item: what it draws is the same
    with any number of workers and after a resume, but not on a different number of processes or
    accumulation steps, which cut other batches. Whole batches are asked for (torch's __getitems__)
    where the dataset has that and draws nothing.

    Args:
        dataset: a torch.utils.data.Dataset, a datasets.Dataset, a list: anything with __len__ and
            __getitem__. A TensorDataset is moved to the accelerator's device once, and indexed there.
        batch_size: of one optimizer step, over all processes and accumulation steps together.
        seed: shuffle by (seed, epoch), for training; None: in the order of the dataset, without
            accumulation, for tests.
        collate_fn: makes a batch of a list of items; None: torch's default_collate.
        num_workers: processes that read items ahead of the training; 0: this process reads them.
        loss_weights: a function of a batch's data, that returns what each sample counts, (n,): tokens
            that are no padding, for instance. The sum over the step is then known before its first
            backward pass.
        deterministic: promise that neither items nor collate_fn draw random numbers; None: what an
            attribute of that name of the dataset says, else unknown.
        max_samples: take the first ones only.
        shard: (rank, world size), where not every process takes samples of its own; None: the
            accelerator's.
        accumulation: micro-batches of a step on each process; None: the accelerator's in training, 1
            in tests. Virtual processes decide it otherwise.
        drop_last: see GlobalSampler.
        order: of the training data, in place of a permutation: see features/sampling.py.

    Raises:
        SystemExit: if the dataset is not map-style, empty, or smaller than a dropped batch, or if the
            order does not fit.
        ValueError: if options contradict each other.
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
        order=None,
    ):
        check_dataset(dataset)
        length = min(len(dataset), max_samples or len(dataset))
        check_options(batch_size, seed, order, loss_weights, shard)
        if order is not None:
            order.fit(len(dataset), length, batch_size)
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
            order=order,
            virtual_processes=virtual_processes(accelerator),
        )
        if len(self) == 0:
            stop(f"--batch_size {batch_size} is more than the {length} items of the training set: take a smaller one")
        self.tensors = None
        if gives_its_tensors(dataset) and collate_fn is None:
            self.tensors = [tensor.to(accelerator.device) for tensor in dataset.tensors]
        self.reader = ItemReader(dataset, collate_fn or default_collate, seed or 0, deterministic)
        self.num_workers = 0 if self.tensors else num_workers
        self._requests = Requests()
        self._workers = None

    def __len__(self) -> int:
        """Steps an epoch."""
        return len(self.sampler)

    @property
    def num_samples(self) -> int:
        """Samples an epoch, over all processes."""
        return min(self.sampler.length, len(self) * self.sampler.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def epoch(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from step `first_step` on. Collective if
        `loss_weights` is set."""
        grad_divisor = 1 if self.sampler.virtual_processes else self.sampler.num_slots
        key = combine(self.sampler.seed or 0, epoch, 3)
        window = []
        for micro_batch, data in self._read(epoch, first_step):
            batch = Batch(
                data=data,
                indices=micro_batch.indices,
                weights=None,
                is_stand_in=micro_batch.is_stand_in,
                step_samples=micro_batch.step_samples,
                step_weight=micro_batch.step_samples,
                micro_step=micro_batch.micro_step,
                slot=micro_batch.slot,
                grad_divisor=grad_divisor,
                random_ids=micro_batch.random_ids,
                key=key,
            )
            if self.loss_weights is None:
                yield batch
                continue
            batch.weights = self._weigh(batch)
            window.append(batch)
            if len(window) == self.sampler.accumulation:
                # Apple GPUs have no float64.
                wide = torch.float32 if batch.weights.device.type == "mps" else torch.float64
                sums = torch.zeros(self.sampler.num_slots, dtype=wide, device=batch.weights.device)
                for each in window:
                    sums[each.slot] = each.counted(each.weights).to(wide).sum()
                # A sum for each micro-batch, so that their order is the same on any number of processes.
                total = self.accelerator.reduce(sums, "sum").sum()
                for each in window:
                    each.step_weight = total.clamp(min=torch.finfo(torch.float32).tiny)
                yield from window
                window = []

    def _weigh(self, batch: Batch) -> torch.Tensor:
        weights = self.loss_weights(batch.data)
        if weights.shape != batch.indices.shape:
            raise ValueError(
                f"loss_weights must return one weight per sample, shape ({len(batch)},), and "
                f"returned {tuple(weights.shape)}"
            )
        return weights if weights.is_floating_point() else weights.float()

    def _read(self, epoch: int, first_step: int) -> Iterator[tuple[MicroBatch, Any]]:
        device = self.accelerator.device
        if self.tensors:
            for micro_batch in self.sampler.micro_batches(epoch, first_step, device):
                # index_select copies whole items: 5 times faster than images[indices]
                data = [tensor.index_select(0, micro_batch.indices) for tensor in self.tensors]
                yield micro_batch, data
            return
        micro_batches, requested = itertools.tee(self.sampler.micro_batches(epoch, first_step))
        requests = ((epoch, micro_batch.indices.tolist(), micro_batch.random_ids.tolist()) for micro_batch in requested)
        try:
            for micro_batch, data in zip(micro_batches, self._answers(requests), strict=True):
                if device.type != "cpu":
                    # Not blocking: from pinned memory, the GPU copies while the CPU goes on.
                    data = send_to_device(data, device, non_blocking=True)
                    indices, random_ids = (tensor.to(device, non_blocking=True) for tensor in micro_batch[:2])
                    micro_batch = micro_batch._replace(indices=indices, random_ids=random_ids)
                yield micro_batch, data
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
            if not self.tensors and not self.sampler.virtual_processes:  # which cut the same batches everywhere
                self.reader.warn_of_random_collate()
            return {"items": self.sampler.length, "fingerprint": self.reader.fingerprint()}
        except UnreadableItem as error:
            stop_at_unreadable_item(error)

    def resume_invariants(self) -> dict:
        """What must not change between a run and its resume, besides the data."""
        sampler = self.sampler
        facts = {"batch_size": sampler.batch_size, "seed": sampler.seed, "steps_per_epoch": len(self)}
        facts |= {"drop_last": sampler.drop_last, "repeats": 1}
        if sampler.order is not None:
            facts |= sampler.order.resume_invariants()
        if sampler.virtual_processes:
            facts["virtual_processes"] = sampler.virtual_processes
        return facts


def describe_data(train_loader: GlobalLoader, test_loader: GlobalLoader | None, known: dict) -> dict:
    """What run.json, the screen and the comparison with other processes and launches have of the data.

    Args:
        known: what the script says itself; it goes before what the loaders say.
    """
    train = train_loader.describe()
    found, fingerprints = {"train": train["items"]}, [train["fingerprint"]]
    if test_loader is not None:
        test = test_loader.describe()
        found["test"] = test["items"]
        fingerprints.append(test["fingerprint"])
    found["fingerprint"] = "-".join(dict.fromkeys(fingerprints))
    return found | known


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
                dataset, "deterministic", gives_its_tensors(dataset) and collate_fn is default_collate
            )
        self.deterministic = deterministic
        self.whole_batches = hasattr(dataset, "__getitems__")

    def __getitems__(self, request: tuple[int, list[int], list[int]]):
        """The batch of a request (epoch, items, random ids)."""
        epoch, indices, random_ids = request
        items = self._items(epoch, indices, random_ids)
        if not self.deterministic:
            seed_generators(combine(self.seed, epoch, random_ids[0], COLLATE))
        return self.collate_fn(items)

    def read_and_restore(self, request):
        """`__getitems__` in a process that goes on with its own random numbers afterwards."""
        if self.deterministic:
            return self.__getitems__(request)
        with generators_restored():
            return self.__getitems__(request)

    def _items(self, epoch: int, indices: list[int], random_ids: list[int]) -> list:
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
        for index, draw in zip(indices, random_ids, strict=True):
            seed_generators(combine(self.seed, epoch, draw))
            items.append(self.dataset[index])
        return items

    def warn_of_random_collate(self) -> None:
        """Warn where collate_fn draws random numbers: they belong to a batch, which each topology cuts differently."""
        if self.deterministic or self.collate_fn is default_collate:
            return
        with generators_restored():
            items = self._items(0, [0], [0])
            seed_generators(0)
            expected = first_draws()
            seed_generators(0)
            self.collate_fn(items)
            draws = first_draws() != expected
        if draws and is_local_main():
            show(
                "warning: collate_fn draws random numbers, which belong to a batch: on a different number of "
                "processes or accumulation steps the batches, and so these numbers, will differ; draw in "
                "__getitem__, in the loop by batch.rand, or train with --virtual_processes",
                "yellow",
            )

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
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        stop(
            f"the dataset is a {kind}, which cannot be read by item number: the order of the data "
            "could not be the same "
            "on another number of processes, nor be resumed; take a map-style dataset (__len__ and "
            "__getitem__), for "
            "instance list(dataset) or datasets.Dataset.from_generator"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, itertools.islice(dataset, 5)))
        stop(f"the dataset is a {kind} with {names or 'nothing in it'}: pass one of its parts, such as data['train']")
    if len(dataset) == 0:
        stop(f"the dataset, a {kind}, has no items")


def check_options(batch_size: int, seed, order, loss_weights, shard) -> None:
    """Raises: ValueError, if options of a GlobalLoader contradict each other."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, and is {batch_size}")
    if seed is None and order is not None:
        raise ValueError("an order needs a seed: without one the order is that of the dataset")
    if loss_weights is not None and shard is not None:
        raise ValueError("loss_weights cannot be combined with shard: samples would count once per process")
