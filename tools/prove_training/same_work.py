"""Has any script do the same work on each number of processes, and only a little of it.

All of this is put in place before the script is imported, and none of it changes what the script reads of its own
objects, but for their length: data sets are cut, what DataLoader gets as a batch size is divided by the processes, a
shuffle without a generator repeats that of the reference, and what may differ by nature (dropout, the batch statistics
of BatchNorm, mixed precision) is switched off.
"""

import contextlib
import copyreg
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import IterableDataset, Subset
from torch.utils.data._utils import fetch

from .tensors import digest

TAG = "batch with digests"  # a plain tuple that begins with this: scripts may have a package of our name
BATCHES = 6  # whole micro-batches of an epoch
REST = 5  # samples after them: neither 2 nor 3 processes divide an epoch
LARGEST = 12  # samples of a micro-batch over all processes


def micro_batch(given: int) -> int:
    """Samples of a micro-batch over all processes: divides by 1, 2 and 3 of them."""
    return LARGEST if given >= LARGEST else LARGEST // 2


def items_of_epoch(batch_size: int = LARGEST) -> int:
    return BATCHES * batch_size + REST


def cut(data, limit: int):
    """`data` with at most `limit` items: the object itself, of a subclass of its class, wherever that can be done.

    Of a Subset in order, such as every second item, those items are left that a cut of its data set has: the parts
    of a division by hand are parts of the same items.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return data
    if isinstance(data, Subset):
        indices = list(data.indices)
        is_part = indices == sorted(indices) and len(indices) > 1 and indices[1] < limit
        data.indices = [index for index in indices if index < limit] if is_part else indices[:limit]
        return data
    if len(data) <= limit:
        return data
    if isinstance(data, (list, tuple, np.ndarray, torch.Tensor)):
        return data[:limit]
    original = type(data)
    members = {
        "__len__": lambda self: min(limit, original.__len__(self)),
        "__reduce_ex__": lambda self, protocol: (copyreg.__newobj__, (original,), self.__dict__),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    with contextlib.suppress(TypeError):  # of a class that is not written in Python
        data.__class__ = type(original.__name__, (original,), members)
    return data


@contextlib.contextmanager
def seeded(seed: int):
    """Seed all global generators, and set them back at the end."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def generator_states() -> int:
    """Changes with each draw from a global generator."""
    numbers = np.random.get_state()
    return hash((torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers[1].tobytes(), numbers[2]))


def fetch_with_digests(self, index):
    """In place of the fetch of a map-style data set: items by their own seeds, and their digests beside the batch."""
    if getattr(self.dataset, "prove_reads_itself", False):
        return plain_fetch(self, index)
    indices = index if self.auto_collation else [index]

    def read(item):
        with seeded(1000 + hash(item) % 2**31):
            return self.dataset[item]

    items = [read(item) for item in indices]
    digests = [digest(item) for item in items]
    is_random = False
    if not hasattr(self, "has_read_twice"):
        self.has_read_twice = True
        is_random = digest(self.dataset[indices[0]]) != digests[0]
        items[0] = read(indices[0])  # where an item is changed in place
    return TAG, self.collate_fn(items if self.auto_collation else items[0]), digests, is_random


class SwitchedOff:
    """Switches off what must differ between topologies; `switched_off` says what the script has of it."""

    def __init__(self, recording):
        self.recording, self.switched_off = recording, set()
        self.statistics = {}  # of BatchNorm, at the beginning

    def install(self) -> None:
        for name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):
            setattr(F, name, self._no_dropout)
        attention = F.scaled_dot_product_attention

        def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *others, **options):
            if dropout_p:
                self.switched_off.add("dropout")
            return attention(query, key, value, attn_mask, 0.0, *others, **options)

        F.scaled_dot_product_attention = without_dropout
        if self.recording.plan["is_resumed"] is None:  # a run and its resume have the same batches
            F.batch_norm = self._without_batch_statistics(F.batch_norm)
        nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward
        nn.SyncBatchNorm._check_input_dim = lambda *_: None
        self._no_autocast()
        torch.compile = self._not_compiled

    def _no_dropout(self, input, p=0.5, training=True, inplace=False):
        if training and p > 0:
            self._note("dropout")
        return input

    def _note(self, what: str) -> None:
        self.switched_off.add(what)
        if not torch.is_grad_enabled():
            self.recording.evaluations.in_training_mode()

    def _without_batch_statistics(self, batch_norm):
        """By the running statistics as they were at the beginning; they are computed all the same."""

        def function(input, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
            if mean is None:
                return batch_norm(input, mean, variance, weight, bias, training, momentum, eps)
            fixed = self.statistics.setdefault(id(mean), (mean.clone(), variance.clone(), mean))
            if training:
                self._note("the batch statistics of BatchNorm")
                if input.numel() > input.shape[1]:  # more than one value per channel
                    batch_norm(input.detach(), mean, variance, None, None, True, momentum, eps)
            return batch_norm(input, *fixed[:2], weight, bias, False, momentum, eps)

        return function

    def _no_autocast(self) -> None:
        start = torch.autocast.__init__

        def off(autocast, device_type, dtype=None, enabled=True, cache_enabled=None):
            if enabled:
                self.switched_off.add("mixed precision")
            start(autocast, "cpu", torch.bfloat16, False)

        torch.autocast.__init__ = off

    def _not_compiled(self, model=None, **options):
        self.switched_off.add("torch.compile")
        if model is None:
            return lambda model: self._not_compiled(model, **options)
        return Compiled(model) if isinstance(model, nn.Module) else model


class OnCpu(TorchFunctionMode):
    """What a script puts on a GPU, whether there is one or not, stays on the CPU."""

    NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction")
    ZERO = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(self._place(each) for each in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = self._place(kwargs["device"])
        return function(*args, **kwargs)

    def _place(self, device):
        is_number = isinstance(device, int) and not isinstance(device, bool)
        is_gpu = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
        return torch.device("cpu") if is_number or is_gpu else device

    def install(self) -> None:
        for name in self.NOTHING:
            setattr(torch.cuda, name, lambda *_, **__: None)
        for name in self.ZERO:
            setattr(torch.cuda, name, lambda *_, **__: 0)
        self.__enter__()


class Compiled(nn.Module):
    """A model whose names begin as those of a compiled one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name):
        if name == "_orig_mod":
            return super().__getattr__(name)
        return getattr(self._modules["_orig_mod"], name)

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


class SameData:
    """Cuts data sets, divides batches, and repeats the order of the reference.

    Args:
        processes: of this run.
        limit: items of each data set.
        own_batch_size: divide the batch size of the script, and not one that 2 and 3 divide.
        orders: what the reference has recorded in `recorded`, by sampler: the indices of each pass. None: repeat
            nothing, in the reference itself, and when resuming, where the script must know the order.
    """

    def __init__(self, processes: int, limit: int, own_batch_size: bool, orders: dict | None):
        self.processes, self.limit, self.own_batch_size, self.orders = processes, limit, own_batch_size, orders
        self.splits_batches = False  # Accelerate's split_batches: the script's batch size is that of all processes
        self.recorded, self.passes, self.lengths = {}, {}, {}

    def step_size(self, given: int) -> int:
        return given if self.own_batch_size else micro_batch(given)

    def batch_size(self, given: int) -> int:
        """The batch size of a DataLoader for which the script says `given`."""
        total = self.step_size(given)
        if self.splits_batches:
            return total
        if total % self.processes:
            raise ValueError(f"batches of {total} cannot be divided by {self.processes} processes")
        return total // self.processes

    def cut(self, data):
        before = len(data) if hasattr(data, "__len__") else None
        data = cut(data, self.limit)
        if before is not None:
            self.lengths.setdefault(id(data), before)
        return data

    def order(self, sampler, draw) -> list[int]:
        """The indices of a pass of a sampler that shuffles; draw: draws them as the script would."""
        key = getattr(sampler, "prove_key", None)
        if key is None:
            return draw()
        number = self.passes[key] = self.passes.get(key, -1) + 1
        known = (self.orders or {}).get(key, [])
        is_known = number < len(known) and not sampler.prove_generator
        order = known[number] if is_known else draw()
        self.recorded.setdefault(key, []).append(order)
        return order


plain_fetch = fetch._MapDatasetFetcher.fetch


def install_fetch() -> None:
    fetch._MapDatasetFetcher.fetch = fetch_with_digests
