"""Makes any script do the same work on each number of processes, and only a little of it.

Data sets are cut, items are read with seeds of their own, and what must differ between numbers of processes (dropout,
the batch statistics of BatchNorm, mixed precision) is switched off. The script sees its own objects, only shorter.
"""

import builtins
import contextlib
import copyreg
import os
import random
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset
from torch.utils.data._utils import fetch

from ..tensors import digest, rows
from . import pretended_gpu
from .where import wrap

TAG = "batch with digests"  # marks a plain tuple: a class could be imported twice
BATCHES = 6  # whole micro-batches per epoch
REST = 3  # samples after them: 2 processes do not divide an epoch, and it has as many whole batches on 1, 2 and 3
MOST_TRANSFORMS = 100  # in a list of them
SEEDS = torch.default_generator.manual_seed, random.seed, np.random.seed  # before they are wrapped
SECONDS_APART = 3  # the clocks of two ranks: what is seeded by the time differs
LARGEST = 12  # samples of a micro-batch over all processes


def micro_batch(given: int) -> int:
    """Samples of a micro-batch over all processes: divisible by 1, 2 and 3."""
    return LARGEST if given >= LARGEST else LARGEST // 2


def items_of_epoch(batch_size: int = LARGEST) -> int:
    return BATCHES * batch_size + REST


def cut(data, limit: int):
    """`data` with at most `limit` items: where possible the same object, whose class becomes a subclass."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return data
    if len(data) <= limit:
        return data
    if isinstance(data, Subset):
        data.indices = data.indices[:limit]
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
    """Seed all global generators, and restore them at the end."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for set_seed in SEEDS:
        set_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def generator_states() -> int:
    """A hash that changes with each draw from a global generator."""
    numbers = np.random.get_state()
    return hash((torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers[1].tobytes(), numbers[2]))


def generators_in(value, depth: int = 6) -> Iterator:
    """Random generators that an object holds, as transforms do that draw by themselves."""
    if isinstance(value, (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)):
        yield value
    elif depth and not isinstance(value, (torch.Tensor, np.ndarray, str, type)):
        is_list = isinstance(value, (list, tuple)) and len(value) < MOST_TRANSFORMS
        for part in value if is_list else getattr(value, "__dict__", {}).values():
            yield from generators_in(part, depth - 1)


def seed_generator(generator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


seeds_own_generators = False  # as the plan says
plain_fetch = fetch._MapDatasetFetcher.fetch


def fetch_with_digests(self, index):
    """Replaces the fetch of a map-style dataset: seeds each item by its index, and adds digests to the batch."""
    if isinstance(self.collate_fn, Tagged):  # a loader that seeds its items itself
        return plain_fetch(self, index)
    indices = index if self.auto_collation else [index]

    def read(item, seed_of=None):
        seed = 1000 + hash(item if seed_of is None else seed_of) % 2**31
        for generator in generators_in(self.dataset) if seeds_own_generators else ():
            seed_generator(generator, seed)
        with seeded(seed):
            return self.dataset[item]

    items = [read(item) for item in indices]
    digests, found = [digest(item) for item in items], set()
    if not hasattr(self, "has_read_twice"):
        self.has_read_twice = True
        state = torch.get_rng_state()
        if digest(self.dataset[indices[0]]) != digests[0]:
            found.add("draws_others" if torch.equal(state, torch.get_rng_state()) else "draws_items")
            if digests[0] != digests[-1] == digest(read(indices[0], seed_of=indices[-1])):
                found.add("ignores_index")
        items[0] = read(indices[0])  # an item may have been changed in place
        if digest(items[0]) != digests[0]:
            found.add("draws_by_itself")
    return TAG, self.collate_fn(items if self.auto_collation else items[0]), digests, found


class Tagged:
    """A collate_fn that also returns the digests of the items."""

    def __init__(self, collate_fn, are_batches: bool = False):
        self.collate_fn, self.are_batches = collate_fn, are_batches

    def __call__(self, items):
        digests = rows(items) if self.are_batches else [digest(item) for item in items]
        return TAG, self.collate_fn(items), digests, set()


def install(recording) -> None:
    """Switch off what differs by design between process counts, and record it in the fact `switched_off`."""
    switched_off, statistics = recording.facts.switched_off, {}  # of BatchNorm, at the beginning
    global seeds_own_generators
    seeds_own_generators = recording.plan.seeds_own
    fetch._MapDatasetFetcher.fetch = fetch_with_digests

    def note(what: str) -> None:
        switched_off.add(what)
        if not torch.is_grad_enabled():
            recording.evaluations.in_training_mode()

    for name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):

        @wrap(F, name)
        def no_dropout(original, input, p=0.5, training=True, inplace=False):
            if training and p > 0:
                note("dropout")
            return input

    @wrap(F, "scaled_dot_product_attention")
    def without_dropout(original, query, key, value, attn_mask=None, dropout_p=0.0, *others, **options):
        if dropout_p:
            switched_off.add("dropout")
        return original(query, key, value, attn_mask, 0.0, *others, **options)

    def without_paths(module, _inputs) -> None:
        if type(module).__name__ in ("DropPath", "StochasticDepth") and module.training:  # of timm, of torchvision
            note("stochastic depth")
            module.training = False

    nn.modules.module.register_module_forward_pre_hook(without_paths)

    def batch_norm(
        original, input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        """Normalizes with the initial running statistics; the running statistics are still updated."""
        mean, variance = running_mean, running_var
        if mean is None or torch.jit.is_tracing():  # which compares two calls
            return original(input, mean, variance, weight, bias, training, momentum, eps)
        fixed = statistics.setdefault(id(mean), (mean.clone(), variance.clone(), mean))
        if training:
            note("the batch statistics of BatchNorm")
            if input.numel() > input.shape[1]:  # more than one value per channel
                original(input.detach(), mean, variance, None, None, True, momentum, eps)
        return original(input, *fixed[:2], weight, bias, False, momentum, eps)

    if recording.plan.is_resumed is None:  # a run and its resume have the same batches
        wrap(F, "batch_norm")(batch_norm)
    nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward
    nn.SyncBatchNorm._check_input_dim = lambda *_: None
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # refuses them on CPUs
    install_precision(recording)
    install_machine(recording)


def install_precision(recording) -> None:
    """What rounds differently where a batch is cut differently."""
    switched_off = recording.facts.switched_off
    torch.compiler.set_stance("force_eager")

    def no_autocast(original, autocast, device_type, dtype=None, enabled=True, cache_enabled=None):
        if enabled:
            switched_off.add("mixed precision")
        original(autocast, "cpu", torch.bfloat16, False)

    wrap(torch.autocast, "__init__")(no_autocast)

    @wrap(torch, "compile")
    def not_compiled(original, model=None, **options):
        switched_off.add("torch.compile")
        return original(model, backend="eager")

    @wrap(nn.parallel.DistributedDataParallel, "register_comm_hook")
    def no_hook(original, ddp, state, hook):
        if not hook.__module__.startswith("torch."):
            return original(ddp, state, hook)
        switched_off.add("PyTorch's own communication hooks, which round gradients")


def install_machine(recording) -> None:
    """Clocks, hashes of strings, and the devices that there are."""

    def own_hash(original, value):
        """As in processes that are started, and not forked: in each, Python's hash of a string is another one."""
        is_own = isinstance(value, str) and recording.where.is_own(sys._getframe(2).f_code.co_filename)
        return original((recording.rank, value) if is_own else value)

    if recording.rank and os.environ.get("PYTHONHASHSEED", "random") == "random":
        wrap(builtins, "hash")(own_hash)
    for name in ("time", "perf_counter", "monotonic", "process_time"):
        run_clock(name, recording.plan.clock, SECONDS_APART * recording.rank)
    for owner in (torch.cuda, torch.accelerator):

        @wrap(owner, "is_available")
        def is_available(original):
            if recording.where.is_own(sys._getframe(2).f_code.co_filename):
                recording.facts.asks = True
            return original()

    if recording.plan.without_gpu:
        pretended_gpu.install(recording)


def run_clock(name: str, factor: int, ahead: int) -> None:
    """Let a clock run `factor` times as fast, and some seconds ahead of that of rank 0."""
    begin = getattr(time, name)()
    wrap(time, name)(lambda original: begin + ahead + factor * (original() - begin))
