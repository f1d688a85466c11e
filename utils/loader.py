"""Batches of a map-style dataset that are the same on any number of processes, workers and accumulation steps."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import IterableDataset, TensorDataset

from .agree import same_on_all
from .console import stop
from .fingerprint import digest
from .layout import Layout
from .randomness import Purpose, combine, random_normal, random_uniform, widest_float
from .sampler import GlobalSampler, MicroBatch


@dataclasses.dataclass
class Batch(MicroBatch):
    """One micro-batch of one process: n samples, at least one; the other fields are inherited from MicroBatch.

    If the last step of an epoch has fewer samples than micro-batches, the remaining micro-batches get a stand-in: a
    real sample with weight zero, so that models never see an empty batch.
    """

    data: Any  # the collated items, on the accelerator's device
    grad_divisor: int  # what DDP and accelerator.backward will divide the gradient by; 1 in a pipeline
    key: int  # seed of the epoch's random numbers
    weights: torch.Tensor | None = None  # (n,): weight of each sample in mean losses; None: all equal
    step_weight: torch.Tensor | None = None  # sum of the weights over the whole step
    mean_loss_calls = 0  # of all batches

    def __len__(self) -> int:
        return len(self.indices)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (n, ...) unchanged, or an empty tensor (0, ...) for a stand-in.

        For values that you gather yourself; `mean_loss` and metrics do this already.
        """
        return values[:0] if self.is_stand_in else values

    def mean_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of the step's mean loss, for `accelerator.backward`; 0 for a stand-in.

        DDP divides gradients by the number of processes and accelerator.backward by the accumulation steps, which is
        correct only if all micro-batches have the same size. So the sum of the losses is multiplied by both numbers and
        divided by the number of samples (or the weight) of the whole step. Pipelines and virtual processes sum
        gradients instead, so there is no division to undo.

        Args:
            losses: (n,), one per sample; with weights, the mean is sum(weights * losses) / sum(weights). Or a scalar,
                if the model only returns the mean over this micro-batch: exact if the model averages over samples, or
                over what `loss_weights` counts (such as tokens that are not padding).
        """
        Batch.mean_loss_calls += 1
        if losses.ndim == 0:
            losses = losses.expand(len(self))
        if losses.shape != self.indices.shape:
            raise ValueError(
                f"mean_loss takes one loss per sample, shape ({len(self)},), or their mean, shape (), but got "
                f"{tuple(losses.shape)}: outputs and targets need one shape, and losses a mean over all dimensions but "
                "the first; if collate_fn leaves items out, filter the dataset, or give them weight 0 by loss_weights"
            )
        losses = self.counted(losses)
        if self.weights is None:
            return losses.dot(torch.full_like(losses, self.grad_divisor / self._step_samples))  # one node of autograd
        # The sum may overflow the dtype of the weights.
        shares = self.counted(self.weights).to(self.step_weight.dtype) / self.step_weight
        return (losses * shares.to(losses.dtype)).sum() * self.grad_divisor

    def rand(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Uniform random numbers in [0, 1), float32 (n, *shape), that depend only on (seed, epoch, sample, stream).

        For dropout, noise and augmentation in the training loop; each use needs its own `stream`.
        """
        return random_uniform(combine(self.key, stream), self.random_ids, shape)

    def randn(self, *shape: int, stream: int = 0) -> torch.Tensor:
        """Standard normal random numbers, float32 (n, *shape); see `rand`."""
        return random_normal(combine(self.key, stream), self.random_ids, shape)


class GlobalLoader:
    """Loads a map-style dataset in batches: each step has the same samples on any topology.

    Before an item is read, the global generators of torch, Python and NumPy are seeded by (seed, epoch, item), so
    random augmentation does not depend on processes, workers or resuming. Before collate_fn they are seeded by the
    batch's first item: what it draws does not depend on workers or resuming, but it does depend on the number of
    processes and accumulation steps, which cut different batches.

    Args:
        dataset: a torch.utils.data.Dataset, a datasets.Dataset, a list: anything with __len__ and __getitem__.
            A TensorDataset moves to the accelerator's device, unless it exceeds a quarter of a GPU's free memory. A
            method set_epoch(epoch) is called before the items of an epoch are read, also in workers; in tests with 0.
            An attribute `deterministic` that is true promises that neither items nor collate_fn draw random numbers.
        batch_size: samples per step, over all processes and accumulation steps.
        accelerator: from make_accelerator.
        seed: shuffles by (seed, epoch), for training; None: dataset order, for testing.
        name: each loader of a run has its own, and its order and random numbers depend on (seed, name). None: "train"
            with a seed, "test" without.
        order: function of the epoch that returns the indices of its items, int64 (n,), with the same n in each epoch;
            items may repeat or be missing. Before each call, the global generators of torch, Python and NumPy are
            seeded by (seed, epoch). The random numbers of an item then depend on its position instead of its index.
        collate_fn: makes a batch from a list of items; None: torch's default_collate.
        num_workers: processes that read items ahead; 0: this process reads them.
        loss_weights: function from a batch's data to the weight of each sample, (n,), such as its number of tokens
            that are not padding. Their sum over the step is then known before its first backward pass. Metrics whose
            name is a loss have these weights, too.
        max_samples: use only the first ones.
        shard: (rank, world size) of a pipeline's copies, whose processes share their samples and sum gradients; None:
            the accelerator's.
        accumulation: micro-batches per step on each process; None: the accelerator's in training, 1 in testing.
            Ignored with virtual processes.
        drop_last: see GlobalSampler.
    """

    def __init__(
        self,
        dataset,
        batch_size: int,
        accelerator: Accelerator,
        *,
        seed: int | None = None,
        name: str | None = None,
        order: Callable[[int], torch.Tensor] | None = None,
        collate_fn: Callable | None = None,
        num_workers: int = 0,
        loss_weights: Callable[[Any], torch.Tensor] | None = None,
        max_samples: int | None = None,
        shard: tuple[int, int] | None = None,
        accumulation: int | None = None,
        drop_last: bool = False,
    ):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            stop(
                f"a {type(dataset).__name__} has no indices, so its order can neither be the same on any number of "
                "processes nor be resumed: use a map-style dataset, such as list(dataset) or "
                "datasets.Dataset.from_generator"
            )
        if loss_weights is not None and shard is not None:
            raise ValueError("loss_weights cannot be combined with shard: samples would count once per process")
        layout = accelerator.layout
        if shard is not None:
            layout = Layout(rank=shard[0], processes=shard[1], accumulation=layout.accumulation)
        if accumulation is not None or seed is None:
            layout = dataclasses.replace(layout, accumulation=accumulation or 1)
        self.dataset, self.accelerator, self.loss_weights, self.seed = dataset, accelerator, loss_weights, seed
        kind = "test" if seed is None else "train"
        self.name = name or kind
        if accelerator.loaders is None:
            stop("a loader is part of the run, which compares its data when resuming: make it before run.start")
        if self.name in accelerator.loaders:
            stop(f"two loaders are named {self.name!r}: give the second a name, as in GlobalLoader(..., name='other')")
        self.stream_seed = stream_seed(seed, self.name, kind)
        self.sums_gradients = shard is not None or layout.virtual_processes > 0
        self.sampler = GlobalSampler(
            min(len(dataset), max_samples or len(dataset)),
            batch_size,
            layout,
            seed=None if seed is None else self.stream_seed,
            drop_last=drop_last,
            order=order,
        )
        if len(self) == 0:
            stop(f"--batch_size {batch_size} is more than the {self.sampler.length} items of an epoch: use fewer")
        self.reader, device = None, accelerator.device
        self.tensors = tensors_on_device(dataset, device) if collate_fn is None else None
        if self.tensors is None:
            from .items import ItemReader  # not needed for images in memory

            self.reader = ItemReader(dataset, collate_fn, self.stream_seed, num_workers, device)
        accelerator.loaders[self.name] = self

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
        """This process's micro-batches of an epoch, from step `first_step` on.

        Collective if `loss_weights` or `order` is set.
        """
        if self.sampler.order is not None:
            same_on_all({f"order({epoch}) of the {self.name} loader": digest(self.sampler.items(epoch)[0])})
        grad_divisor = 1 if self.sums_gradients else self.sampler.num_slots
        key = combine(self.stream_seed, epoch, Purpose.SAMPLES)
        read = self._read(epoch, first_step)
        batches = (Batch(**vars(part), data=data, grad_divisor=grad_divisor, key=key) for part, data in read)
        return batches if self.loss_weights is None else self._weighted(batches)

    def from_step(self, step: int) -> Iterator[Batch]:
        """This process's micro-batches from step `step` of the run on, epoch after epoch, without end.

        For a second loader in the training loop: `others = loader.from_step(run.step)`, then `next(others)`.
        """
        for epoch in itertools.count(step // len(self)):
            yield from self.epoch(epoch, step % len(self))
            step = 0

    def _weighted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Set the weights of each batch, and their sum over the whole step. Collective."""
        device, is_first = self.accelerator.device, True
        for step in zip(*[batches] * self.sampler.accumulation, strict=True):
            # One sum per micro-batch, added in the same order on any number of processes.
            sums = torch.zeros(self.sampler.num_slots, dtype=widest_float(device), device=device)
            for batch in step:
                weights = torch.as_tensor(self.loss_weights(batch.data), device=device)
                batch.weights = weights if weights.is_floating_point() else weights.float()
                # Values are checked in the first step only: it makes the CPU wait for a GPU.
                is_valid = weights.shape == batch.indices.shape
                if not is_valid or (is_first and not ((batch.weights >= 0) & batch.weights.isfinite()).all()):
                    raise ValueError(
                        f"loss_weights must return one weight per sample, shape ({len(batch)},), finite and at least "
                        f"0, but returned {weights}"
                    )
                sums[batch.slot] = batch.counted(batch.weights).to(sums.dtype).sum()
            is_first = False
            total = self.accelerator.reduce(sums, "sum").sum()
            for batch in step:
                batch.step_weight = total.clamp(min=torch.finfo(torch.float32).tiny)
            yield from step

    def _read(self, epoch: int, first_step: int) -> Iterator[tuple[MicroBatch, Any]]:
        if self.reader is not None:
            yield from self.reader.read(epoch, self.sampler.micro_batches(epoch, first_step))
            return
        for micro_batch in self.sampler.micro_batches(epoch, first_step, self.accelerator.device):
            # index_select copies whole items: 5 times faster than images[indices]
            yield micro_batch, [tensor.index_select(0, micro_batch.indices) for tensor in self.tensors]

    def describe(self) -> dict:
        """The size of the data and a fingerprint, which must be the same on all processes and when resuming.

        The fingerprint is the dataset's own if it has one, else a digest of all tensors, or of 16 items.
        With `order`, a digest of the first two epochs is added.
        """
        fingerprint = getattr(self.dataset, "fingerprint", None)
        if not isinstance(fingerprint, str):
            whole = gives_its_tensors(self.dataset)
            fingerprint = digest(self.dataset.tensors) if whole else self.reader.fingerprint()
        facts = {"items": self.sampler.dataset_length, "fingerprint": fingerprint}
        if self.sampler.order is not None:
            facts["order"] = digest([self.sampler.items(epoch)[0] for epoch in (0, 1)])
        return facts

    def settings(self) -> dict:
        """What decides, beside the data, which samples a step has."""
        return {"seed": self.seed, "batch_size": self.sampler.batch_size, "drop_last": self.sampler.drop_last}


def describe_data(loaders: dict[str, GlobalLoader]) -> dict:
    """The data's facts for run.json and the banner, by the names of the loaders."""
    described = {name: loader.describe() for name, loader in loaders.items()}
    facts = {name: each["items"] for name, each in described.items()}
    facts |= {f"{name}_order": each["order"] for name, each in described.items() if "order" in each}
    return facts | {"fingerprint": "-".join(dict.fromkeys(each["fingerprint"] for each in described.values()))}


def stream_seed(seed: int | None, name: str, kind: str) -> int:
    """The seed of a loader: of training its own, of a test, or of a further loader, one that depends on the name."""
    if seed is not None and name == kind:
        return seed
    number = 0 if name == kind else int(digest(name), 16)
    return combine(-1 if seed is None else seed, number, Purpose.LOADER)  # -1: no training seed


def tensors_on_device(dataset, device: torch.device) -> list[torch.Tensor] | None:
    """The tensors of a TensorDataset, on the device; None for other data, and if a GPU has too little free memory."""
    if not gives_its_tensors(dataset):
        return None
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    is_small = sum(tensor.nbytes for tensor in dataset.tensors) <= free_bytes / 4
    return [tensor.to(device) for tensor in dataset.tensors] if is_small else None


def gives_its_tensors(dataset) -> bool:
    """Whether the items are slices of `dataset.tensors`: a TensorDataset, not a subclass that changes the items."""
    is_plain = getattr(type(dataset), "__getitem__", None) is TensorDataset.__getitem__
    return is_plain and not hasattr(dataset, "__getitems__") and not hasattr(dataset, "set_epoch")
