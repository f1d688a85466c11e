"""Batches of any map-style dataset that are the same on any number of processes, workers and accumulation steps."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset, TensorDataset

from .console import stop
from .fingerprint import digest
from .randomness import combine, random_normal, random_uniform, widest_float
from .sampler import GlobalSampler, MicroBatch, virtual_processes


@dataclasses.dataclass(slots=True)
class Batch:
    """One micro-batch of one process: n samples, at least one.

    Where the last step of an epoch has fewer samples than micro-batches, some processes have none. They get a
    stand-in: one real sample, which counts nothing. No model has to know what to do without a sample.
    """

    data: Any  # what the dataset and collate_fn make of the items, on the accelerator's device
    # Those of a MicroBatch, in its order:
    indices: torch.Tensor  # int64 (n,): which items these are; the same numbers on any topology
    random_ids: torch.Tensor  # int64 (n,): what `rand` depends on
    is_stand_in: bool
    _step_samples: int  # of all processes; private, because `losses.sum() / step_samples` would count stand-ins
    micro_step: int  # number of this micro-batch within the step, on this process, from 0
    slot: int  # the same over all processes
    # Those of the loader:
    grad_divisor: int  # what DDP and accelerator.backward will divide its gradient by; 1 in a pipeline
    key: int  # of the epoch's random numbers
    weights: torch.Tensor | None = None  # (n,): what each sample counts in means; None: all count alike
    step_weight: torch.Tensor | None = None  # the sum of the weights of the whole step

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """The values (n, ...) of the samples that count: all of them, or none (0, ...) of a stand-in.

        For what you gather yourself; `mean_loss` and metrics do it themselves.
        """
        return values[:0] if self.is_stand_in else values

    def mean_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the mean loss of the step, for `accelerator.backward`; a stand-in adds 0.

        DDP divides gradients by the number of processes, and accelerator.backward by the accumulation steps. Both are
        right only where all parts of a step are equally large. So the sum of the losses is multiplied by both numbers,
        and divided by the samples (the weight) of the whole step. In a pipeline and with virtual processes, which sum
        gradients, nothing divides.

        Args:
            losses: (n,), one per sample. With weights, the mean is sum(weights * losses) / sum(weights).
                Or a scalar, from a model that returns nothing else: the mean over this micro-batch, by the
                same weights. That is exact if the model averages over samples, or over what `loss_weights`
                counts (tokens that are no padding, for a language model).
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
            return losses.sum() * (self.grad_divisor / self._step_samples)
        # In the dtype of the sum, which may be too large for that of the weights.
        shares = self.counted(self.weights).to(self.step_weight.dtype) / self.step_weight
        return (losses * shares.to(losses.dtype)).sum() * self.grad_divisor

    def rand(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Uniform numbers in [0, 1), float32 (n, *shape): a function of (seed, epoch, sample), on any topology.

        For dropout, noise and augmentation in the training loop.

        Args:
            stream: a different number for each use.
        """
        return random_uniform(combine(self.key, stream), self.random_ids, shape)

    def randn(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Standard normal numbers, float32 (n, *shape), as `rand`."""
        return random_normal(combine(self.key, stream), self.random_ids, shape)


class GlobalLoader:
    """The batches of a map-style dataset, the same samples in every step on any topology.

    Before an item is read, the global generators of torch, Python and NumPy are seeded by (seed, epoch, item): what an
    augmentation draws from them does not depend on processes, workers or a resume. Before collate_fn they are seeded by
    the batch's first item: what it draws is the same with any number of workers and after a resume, but not on a
    different number of processes or accumulation steps, which cut different batches.

    Args:
        dataset: a torch.utils.data.Dataset, a datasets.Dataset, a list: anything with __len__ and __getitem__.
            A TensorDataset is moved to the accelerator's device once, and indexed there.
        batch_size: samples per step, over all processes and accumulation steps.
        seed: shuffle by (seed, epoch), for training; None: in the order of the dataset, for tests.
        collate_fn: makes a batch of a list of items; None: torch's default_collate.
        num_workers: processes that read items ahead of the training; 0: this process reads them.
        loss_weights: a function of a batch's data that returns what each sample counts, (n,): tokens that are no
            padding, for instance. The sum over the step is then known before its first backward pass.
        deterministic: promise that neither items nor collate_fn draw random numbers; None: what an attribute of that
            name of the dataset says, else unknown.
        max_samples: take the first ones only.
        shard: (rank, world size) of a pipeline's copies, whose processes share their samples and sum gradients; None:
            the accelerator's.
        accumulation: micro-batches of a step on each process; None: the accelerator's in training, 1 in tests.
            Virtual processes decide it otherwise.
        drop_last: see GlobalSampler.
        repeats: see GlobalSampler.

    Raises:
        SystemExit: if the dataset is not map-style, empty, or smaller than a dropped batch.
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
        repeats: int = 1,
    ):
        check_dataset(dataset)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, and is {batch_size}")
        if repeats > 1 and (seed is None or batch_size % repeats):
            raise ValueError(f"{repeats} repeats of an item need a seed, and must divide batch_size {batch_size}")
        if loss_weights is not None and shard is not None:
            raise ValueError("loss_weights cannot be combined with shard: samples would count once per process")
        length = min(len(dataset), max_samples or len(dataset))
        if accumulation is None:
            accumulation = 1 if seed is None else accelerator.gradient_accumulation_steps
        self.dataset, self.accelerator, self.loss_weights = dataset, accelerator, loss_weights
        self.sums_gradients = shard is not None or virtual_processes(accelerator) > 0
        self.sampler = GlobalSampler(
            length,
            batch_size,
            *(shard or (accelerator.process_index, accelerator.num_processes)),
            seed=seed,
            accumulation=accumulation,
            drop_last=drop_last,
            repeats=repeats,
            virtual_processes=virtual_processes(accelerator),
        )
        if len(self) == 0:
            stop(f"--batch_size {batch_size} is more than the {length} items of the training set: take a smaller one")
        self.tensors = self.reader = None
        if gives_its_tensors(dataset) and collate_fn is None:
            self.tensors = [tensor.to(accelerator.device) for tensor in dataset.tensors]
        else:
            from .items import ItemReader  # here and not above: images in memory do not need it

            self.reader = ItemReader(dataset, collate_fn, seed or 0, deterministic, num_workers, accelerator.device)

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self.sampler)

    @property
    def num_samples(self) -> int:
        """Samples per epoch, over all processes."""
        return min(self.sampler.length, len(self) * self.sampler.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def epoch(self, epoch: int = 0, first_step: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from step `first_step` on. Collective if `loss_weights` is set."""
        grad_divisor = 1 if self.sums_gradients else self.sampler.num_slots
        key = combine(self.sampler.seed or 0, epoch, 3)
        read = self._read(epoch, first_step)
        batches = (Batch(data, *micro_batch, grad_divisor, key) for micro_batch, data in read)
        return batches if self.loss_weights is None else self._weighted(batches)

    def _weighted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches with their weights, and the sum of these over the whole step. Collective."""
        for step in zip(*[batches] * self.sampler.accumulation, strict=True):
            # A sum for each micro-batch, so that their order is the same on any number of processes.
            device = self.accelerator.device
            sums = torch.zeros(self.sampler.num_slots, dtype=widest_float(device), device=device)
            for batch in step:
                weights = self.loss_weights(batch.data)
                if weights.shape != batch.indices.shape:
                    raise ValueError(
                        f"loss_weights must return one weight per sample, shape ({len(batch)},), and "
                        f"returned {tuple(weights.shape)}"
                    )
                batch.weights = weights if weights.is_floating_point() else weights.float()
                sums[batch.slot] = batch.counted(batch.weights).to(sums.dtype).sum()
            total = self.accelerator.reduce(sums, "sum").sum()
            for batch in step:
                batch.step_weight = total.clamp(min=torch.finfo(torch.float32).tiny)
            yield from step

    def _read(self, epoch: int, first_step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch and its data, both on the accelerator's device."""
        if self.reader is not None:
            yield from self.reader.read(epoch, self.sampler.micro_batches(epoch, first_step))
            return
        for micro_batch in self.sampler.micro_batches(epoch, first_step, self.accelerator.device):
            # index_select copies whole items: 5 times faster than images[indices]
            yield micro_batch, [tensor.index_select(0, micro_batch.indices) for tensor in self.tensors]

    def describe(self) -> dict:
        """What identifies the data: compared between processes, and between a run and its resume.

        The fingerprint is the dataset's own if it has one, else a digest of all tensors, or of the first and last item.
        """
        fingerprint = getattr(self.dataset, "fingerprint", None)
        if not isinstance(fingerprint, str):
            whole = gives_its_tensors(self.dataset)
            fingerprint = digest(self.dataset.tensors) if whole else self.reader.fingerprint()
        return {"items": self.sampler.length, "fingerprint": fingerprint}

    def resume_invariants(self) -> dict:
        """What must not change between a run and its resume, besides the data."""
        sampler = self.sampler
        facts = {"batch_size": sampler.batch_size, "seed": sampler.seed, "steps_per_epoch": len(self)}
        facts |= {"drop_last": sampler.drop_last, "repeats": sampler.repeats}
        if sampler.virtual_processes:
            facts["virtual_processes"] = sampler.virtual_processes
        return facts


def describe_data(train_loader: GlobalLoader, test_loader: GlobalLoader | None, known: dict) -> dict:
    """What run.json, the screen and the comparison with other processes and launches have of the data.

    Args:
        known: what the script says itself; it goes before what the loaders say.
    """
    loaders = {"train": train_loader, "test": test_loader}
    described = {split: loader.describe() for split, loader in loaders.items() if loader is not None}
    items = {split: facts["items"] for split, facts in described.items()}
    fingerprints = dict.fromkeys(facts["fingerprint"] for facts in described.values())
    return {**items, "fingerprint": "-".join(fingerprints), **known}


def gives_its_tensors(dataset) -> bool:
    """Whether the items are slices of `dataset.tensors`: a TensorDataset, and no subclass that changes the items."""
    is_plain = getattr(type(dataset), "__getitem__", None) is TensorDataset.__getitem__
    return is_plain and not hasattr(dataset, "__getitems__")


def check_dataset(dataset) -> None:
    """Raises: SystemExit, if `dataset` is not map-style or has no items."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        stop(
            f"the dataset is a {kind}, which cannot be read by item number: the order of the data could not be the "
            "same on a different number of processes, nor be resumed; take a map-style dataset (__len__ and "
            "__getitem__), for instance list(dataset) or datasets.Dataset.from_generator"
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, itertools.islice(dataset, 5)))
        stop(f"the dataset is a {kind} with {names or 'nothing in it'}: pass one of its parts, such as data['train']")
    if len(dataset) == 0:
        stop(f"the dataset, a {kind}, has no items")
