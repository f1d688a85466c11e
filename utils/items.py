"""Reads the items of a dataset, in this process or in workers, each seeded by (seed, epoch, item)."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import find_batch_size, send_to_device
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate

from .console import is_local_main, show, stop
from .failures.processes import end_with_parent
from .fingerprint import digest
from .randomness import combine, generators_restored, seed_generators
from .sampler import MicroBatch

COLLATE = 1  # keeps the random numbers of collate_fn and of the items apart
FINGERPRINT = 2  # and the choice of items whose content is compared
Request = tuple[int, list[int], list[int]]  # epoch, items, their random ids


class UnreadableItem(ValueError):
    """Raised by a dataset for an item that cannot be read; the run ends with its message and no traceback."""


@contextlib.contextmanager
def stop_at_unreadable_items() -> Iterator[None]:
    """End the process, without a traceback, at an UnreadableItem."""
    try:
        yield
    except UnreadableItem as error:  # a worker puts its traceback before the message
        _, _, message = str(error).rpartition("UnreadableItem")
        stop(message.removeprefix(": ").strip() or "an item of the dataset cannot be read", alone=True)


def set_epoch(dataset, epoch: int) -> None:
    """Call `set_epoch` of a dataset that has it, also inside of a Subset, a ConcatDataset or a similar wrapper."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            set_epoch(part, epoch)
    elif hasattr(dataset, "dataset"):
        set_epoch(dataset.dataset, epoch)


class ItemFetcher(Dataset):
    """Reads the items of a request, all at once if the dataset has __getitems__ and is deterministic."""

    newest = None  # the fetcher that read last in this process, and its epoch: two may share a dataset

    def __init__(self, dataset, collate_fn: Callable, seed: int):
        self.dataset, self.own_collate_fn, self.seed = dataset, collate_fn, seed
        self.deterministic = getattr(dataset, "deterministic", False)

    def fetch(self, request: Request) -> Any:
        """The collated batch of a request; leaves this process's random state unchanged."""
        with contextlib.nullcontext() if self.deterministic else generators_restored():
            return self.collate_fn(self.__getitems__(request))

    def __getitems__(self, request: Request) -> list:
        """The items of a request; afterwards the generators are seeded for collate_fn."""
        return list(self._items(*request))

    def _items(self, epoch: int, indices: list[int], random_ids: list[int]) -> Iterator:
        """A generator, out of which StopIteration of an item comes as an error: it would end the epoch unseen."""
        if ItemFetcher.newest != (self, epoch):
            set_epoch(self.dataset, epoch)
            ItemFetcher.newest = self, epoch
        if self.deterministic and (read := getattr(self.dataset, "__getitems__", None)):
            return (yield from read(indices))
        for index, random_id in zip(indices, random_ids, strict=True):
            if not self.deterministic:
                seed_generators(combine(self.seed, epoch, random_id))
            yield self.dataset[index]
        if not self.deterministic:
            seed_generators(combine(self.seed, epoch, random_ids[0], COLLATE))

    def collate_fn(self, items: list) -> Any:
        """The batch of the items; ends the run if the user's function leaves out those that are None.

        As it often does where a file cannot be read: pytorch/pytorch#57429.
        """
        batch, size = self.own_collate_fn(items), None
        left = sum(item is not None for item in items)
        if left < len(items):
            with contextlib.suppress(TypeError, ValueError, IndexError):  # its first part may be no tensor
                size = find_batch_size(batch)
        if size == left:
            raise UnreadableItem(
                f"collate_fn leaves out {len(items) - left} of {len(items)} items, so a mean loss would depend on the "
                "number of processes: filter the dataset instead, or keep them, with a weight of 0 by loss_weights"
            )
        return batch


class Requests:
    """A batch sampler whose `source` is replaced for every epoch, while the workers keep running."""

    source: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.source


def obey_only_parent(_worker: int = 0) -> None:
    """For `worker_init_fn` of a DataLoader: the worker ends with its parent, or when the parent sends SIGTERM.

    Slurm and Kubernetes send SIGTERM to every process of a job, but the parent needs the worker's data to finish the
    step that it then saves. Programs that the dataset starts inherit the blocked SIGTERM.
    """
    if sys.platform != "linux":
        return
    end_with_parent(signal.SIGKILL)  # the worker may be stuck in a read
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def end_when_told() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=end_when_told, daemon=True).start()


class ItemReader:
    """Reads micro-batches, in workers if there are any. For the arguments, see GlobalLoader."""

    def __init__(self, dataset, collate_fn: Callable | None, seed: int, num_workers: int, device: torch.device):
        self.fetcher = ItemFetcher(dataset, collate_fn or default_collate, seed)
        self.num_workers, self.device = num_workers, device
        self._requests, self._workers = Requests(), None

    def read(self, epoch: int, micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch and its data, both on the device."""
        micro_batches, requested = itertools.tee(micro_batches)
        requests = ((epoch, micro_batch.indices.tolist(), micro_batch.random_ids.tolist()) for micro_batch in requested)
        ItemFetcher.newest = None  # the dataset may have changed
        with stop_at_unreadable_items():
            for micro_batch, data in zip(micro_batches, self._batches(requests), strict=True):
                if self.device.type != "cpu":
                    # From pinned memory, the copy overlaps with work on the CPU.
                    data = send_to_device(data, self.device, non_blocking=True)
                    micro_batch.indices = micro_batch.indices.to(self.device, non_blocking=True)
                    micro_batch.random_ids = micro_batch.random_ids.to(self.device, non_blocking=True)
                yield micro_batch, data

    def _batches(self, requests: Iterator[Request]) -> Iterator:
        if self.num_workers == 0:
            return map(self.fetcher.fetch, requests)
        if self._workers is None:
            self._workers = DataLoader(
                self.fetcher,
                batch_sampler=self._requests,
                collate_fn=self.fetcher.collate_fn,
                num_workers=self.num_workers,
                worker_init_fn=obey_only_parent,
                persistent_workers=True,
                pin_memory=self.device.type == "cuda",
                generator=torch.Generator(),  # without one, DataLoader draws from the global generator in every epoch
                # A fork shares memory-mapped tables, and datasets that cannot be pickled.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
            )
        self._requests.source = requests
        return iter(self._workers)

    def fingerprint(self) -> str:
        """A digest of the first item, the last one and 14 more, or of what the dataset's method `source` has for them.

        "differs", and a warning, if one of the items is not the same when it is read twice.
        """
        length, seed = len(self.fetcher.dataset), self.fetcher.seed
        chosen = sorted({0, length - 1, *(combine(seed, n, FINGERPRINT) % length for n in range(14))})
        with generators_restored(), stop_at_unreadable_items():
            first, again = (digest(self.fetcher.__getitems__((0, chosen, chosen))) for _ in range(2))
        if first == again:
            source = getattr(self.fetcher.dataset, "source", None)
            return digest([*map(source, chosen)]) if source else first
        if is_local_main():
            show(
                f"warning: one of the items {', '.join(map(str, chosen))} differs when it is read twice: the dataset "
                "has its own random generator, so the data will depend on processes and workers, and change when "
                "resuming; draw from the global generator of torch, Python or NumPy instead"
            )
        return "differs"
