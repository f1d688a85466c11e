"""Batches: which samples each loader yields, and which of them each backward pass uses."""

import collections
import contextlib
import itertools
import random
import sys

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, dataloader

from ..records import Batch, Loader, Part, Pass
from ..tensors import digest, places, rows, rows_of_inputs
from ..text import CannotTell
from .same_work import TAG, Tagged, cut, generator_states, micro_batch, seeded
from .where import wrap

PASSES = 2  # over the training data
SAMPLERS = (torch_data.RandomSampler, torch_data.SequentialSampler, torch_data.DistributedSampler)
SHORT = 3  # batches of a shortened evaluation, and at most half of them


class Batches:
    """Batches that no model has seen yet, those of the next backward pass, and the passes over each loader.

    Data sets are cut, batches are divided by the processes, and a shuffle without a generator repeats the order of the
    reference.
    """

    def __init__(self, recording):
        self.recording, self.plan, self.loaders = recording, recording.plan, recording.facts.loaders
        self.splits_batches = False  # Accelerate's split_batches: the script's batch size is over all processes
        self.cuts, self.orders = {}, recording.record.orders  # data that were cut, and their lengths before
        self.lengths = collections.defaultdict(list)  # of the data of the loaders that were made at one place
        self.fresh, self.used, self.used_before, self.count = [], [], [], itertools.count()
        self.train_passes = collections.Counter()
        self.is_reading = False  # a batch; a loader may read with another one, as GlobalLoader does
        self.read_to_end = None  # the last pass, until the next one begins
        self.expected_draws = generator_states()

    def step_size(self, given: int) -> int:
        return given if self.plan.own_batch_size else micro_batch(given)

    def batch_size(self, given: int, key: str, is_whole: bool = False) -> int:
        """The batch size of a DataLoader for which the script says `given`, which may be divided by the processes.

        Each process tests in batches of one size, on any number of processes: a result may depend on it. Exception:
        the script splits its test data by hand and divides the batch size itself.
        """
        total = self.step_size(self.whole(given, "sizes") or given)
        of_test = self.plan.tests.get(key)
        if self.splits_batches or self.plan.whole_batches or of_test == given or (of_test and is_whole):
            return total
        if total % self.plan.processes:
            raise CannotTell(f"batches of {total} cannot be divided by {self.plan.processes} processes")
        return total // self.plan.processes

    def whole(self, number: int, kind: str) -> int | None:
        """If the script divided a count by the number of processes itself: the count in the reference; else None."""
        shares = {each: each // self.plan.processes for each in getattr(self.plan, kind)}
        found = [each for each, share in shares.items() if share - 1 <= number <= share + 1]
        return None if number in shares or not found else found[0]

    def cut(self, data):
        if not hasattr(data, "__len__"):
            return data
        before = self.cuts[id(data)][1] if id(data) in self.cuts else len(data)
        self.recording.facts.lengths.add(before)
        is_part = self.whole(before, "lengths") is not None
        share = range(self.plan.limit)[self.recording.rank :: self.plan.processes]
        data = cut(data, len(share) if is_part else self.plan.limit)
        self.cuts[id(data)] = data, before, is_part
        return data

    def cut_indices(self, sampler) -> bool:
        """Whether a sampler has indices of its own, which are cut then in place of the data."""
        if isinstance(sampler, torch_data.SubsetRandomSampler):
            sampler.indices = self.cut(list(sampler.indices))
        return sampler is not None and not isinstance(sampler, SAMPLERS)

    def order(self, sampler, draw) -> list[int]:
        """The indices of a pass of a sampler that shuffles; `draw` returns those of the script itself."""
        key = getattr(sampler, "prove_key", None)
        if key is None:
            return draw()
        orders = self.orders.setdefault(key, [])
        known = (self.plan.orders or {}).get(key, [])[len(orders) :]
        is_known = known and len(known[0]) == len(sampler) and not sampler.prove_generator
        orders.append(known[0] if is_known else draw())
        return orders[-1]

    def key(self, length: int | None) -> str:
        """The name of a loader that is made now; of two that are made in one line, the length of their data decides.

        The reference may have called what starts a process here.
        """
        place = self.recording.where.place()
        if self.recording.facts.starts:
            place = next((each.rpartition(" ")[0] for each in self.plan.places if each.startswith(f"{place} ")), place)
        lengths = self.lengths[place]
        if length not in lengths:
            lengths.append(length)
        return f"{place} {lengths.index(length)}"

    def new_loader(self, loader, key: str, **facts) -> None:
        loader.prove_key = key
        self.loaders[key] = Loader(self.recording.where.line(), **facts)

    def begin_pass(self, loader) -> Pass:
        current = Pass(getattr(loader, "prove_key", "?"), random=digest(torch.get_rng_state()))
        current.epoch = getattr(getattr(loader, "sampler", None), "epoch", None)
        self.recording.record.passes.append(current)
        self.read_to_end = None
        return current

    def end_pass(self, current: Pass) -> None:
        """The script has read all batches of a pass, and did not stop before."""
        current.is_whole, self.read_to_end = True, current

    def deliver(self, current: Pass, digests: list[str] | None, content) -> None:
        """The script gets a batch; those that it has used without a gradient are dropped."""
        current.batches += 1
        current.read.append(digests)
        current.is_whole |= current.batches == current.length
        batch = Batch(current, digests, places(content), content, next(self.count))
        self.fresh = [each for each in self.fresh if not each.is_tested] + [batch]

    def opened(self, content) -> tuple[object, list[str] | None]:
        """What the script gets of a batch, and the digests of its samples."""
        if not (isinstance(content, tuple) and len(content) == 4 and isinstance(content[0], str) and content[0] == TAG):
            return content, None
        _, content, digests, found = content
        for fact in found:
            setattr(self.recording.facts, fact, True)
        if found:
            self.recording.facts.switched_off.add("random augmentation (it is seeded per sample)")
        return content, digests

    def model_called(self, inputs: list) -> None:
        """A model is called with gradients; in a script without a loader, its inputs are the samples."""
        if not self.loaders and (samples := rows_of_inputs(inputs)):
            self.used.append(Batch(None, samples))
        found = self._holding(inputs)
        last = {batch.source.key: batch.number for batch in found}
        self.used += found
        self.fresh = [batch for batch in self.fresh if batch.number > last.get(batch.source.key, -1)]

    def _holding(self, inputs: list) -> list[Batch]:
        """The batches that hold these inputs; of inputs that were computed, the last of each loader that has none."""
        given = places(inputs)

        def holds(batch: Batch) -> bool:
            return any(one.start < other.stop and other.start < one.stop for one in batch.places for other in given)

        found = list(filter(holds, self.fresh))
        if found or any(map(holds, self.used + self.used_before)):
            return found
        known = [batch.source and batch.source.key for batch in self.used]
        last = {batch.source.key: batch for batch in self.fresh}
        return [batch for key, batch in last.items() if key not in known]

    def of_backward(self) -> list[Part]:
        """The samples of a backward pass."""
        samples, ended = [], self.read_to_end
        is_ahead = ended and not self.used and len(ended.read) == len(ended.used) + 1
        if is_ahead:  # its loader reads a batch before it gives the last
            self.used = [Batch(ended, None)]
        for batch in self.used:
            current = batch.source
            if current is not None and not current.in_training:
                current.in_training, current.number = True, self.train_passes[current.key]
                self.train_passes[current.key] += 1
            samples.append(Part(current and current.key, current and current.number, batch.digests))
            if current is not None:
                current.used.append(samples[-1])
        if is_ahead:
            for part, digests in zip(ended.used, ended.read, strict=True):
                part.digests = digests
        self.used, self.used_before = [], self.used or self.used_before
        return samples

    def expect_draws(self) -> None:
        """Random numbers drawn until now are not from the training loop."""
        self.expected_draws = generator_states()

    def draws(self) -> bool:
        """Whether the loop itself has drawn random numbers since the last call."""
        before, self.expected_draws = self.expected_draws, generator_states()
        return before != self.expected_draws

    @contextlib.contextmanager
    def reading(self):
        """Read a batch: random numbers that are drawn for it are not from the training loop. Gives those before it."""
        draws, self.is_reading = self.draws(), True
        try:
            yield draws
        finally:
            self.is_reading = False
        self.expected_draws = None if draws else generator_states()

    def end_passes(self, loader) -> bool:
        """Whether the script has trained enough on these data; the loader is empty from then on."""
        is_over = self.train_passes[getattr(loader, "prove_key", None)] >= PASSES
        if is_over and not self.recording.is_ending:
            self.recording.begin_to_end()
        return is_over

    def is_short(self, iterator) -> bool:
        """Whether this is a pass over test data that the plan shortens."""
        current = getattr(iterator, "prove_pass", None) or Pass("")
        most = SHORT if current.length is None else max(min(SHORT, current.length // 2), 1)
        return current.key in self.recording.plan.shorter and iterator._num_yielded >= most


def install(recording) -> None:
    batches = recording.batches
    install_samplers(batches)
    install_loaders(batches)
    install_iterators(batches)
    for owner, name in ((torch, "manual_seed"), (random, "seed"), (np.random, "seed")):

        @wrap(owner, name)
        def seed(original, *args, **kwargs):
            result = original(*args, **kwargs)
            if not batches.is_reading:
                batches.expect_draws()  # seeding is not drawing
            return result

    with contextlib.suppress(ImportError):
        install_prepared_loaders(batches)


def install_samplers(batches: Batches) -> None:
    for kind in SAMPLERS:

        @wrap(kind, "__init__")
        def init(original, sampler, *args, **kwargs):
            for word in ("data_source", "dataset"):
                if word in kwargs:
                    kwargs[word] = batches.cut(kwargs[word])
            original(sampler, *map(batches.cut, args[:1]), *args[1:], **kwargs)
            sampler.prove_generator = kwargs.get("generator") is not None
            if getattr(sampler, "_num_samples", None):  # such as 10**10 with replacement, for a loop without an end
                sampler._num_samples = min(sampler._num_samples, len(sampler.data_source))

    @wrap(torch_data.DistributedSampler, "__iter__")
    def share(original, sampler):
        """The share of a process in the order of the reference, if that has a sampler of another kind."""
        key = getattr(sampler, "prove_key", None)
        known = (batches.plan.orders or {}).get(key, [])
        if batches.plan.same_share:
            sampler.rank = 0
        sampler.prove_passes = number = getattr(sampler, "prove_passes", -1) + 1
        if not sampler.shuffle or number >= len(known) or len(known[number]) != len(sampler.dataset):
            return original(sampler)
        order = (known[number] + known[number])[: sampler.total_size]
        return iter(order[sampler.rank :: sampler.num_replicas])

    for name in ("RandomSampler", "SubsetRandomSampler"):

        @wrap(getattr(torch_data, name), "__iter__")
        def order(original, sampler):
            if not hasattr(sampler, "prove_generator"):
                sampler.prove_generator = getattr(sampler, "generator", None) is not None
            return iter(batches.order(sampler, lambda: list(original(sampler))))


def install_loaders(batches: Batches) -> None:
    @wrap(DataLoader, "__init__")
    def init_loader(original, loader, dataset, batch_size=1, *args, **kwargs):
        of_accelerate = sys._getframe(2).f_globals.get("__name__", "").startswith("accelerate.")
        is_refused = batch_size is not None and (type(batch_size) is not int or batch_size < 1)
        if of_accelerate or batches.is_reading or is_refused:
            original(loader, dataset, batch_size, *args, **kwargs)
        elif (again := made_again()) is not None:  # by arguments that may be those of the script
            size = again.batch_size if kwargs.get("batch_sampler") is None else batch_size
            original(loader, again.dataset, size, *args, **kwargs)
            loader.prove_key = again.prove_key
            made = {"sampler": type(loader.sampler).__name__, "drop_last": drops_last(loader)}
            vars(batches.loaders[loader.prove_key]).update(made)
        else:
            make_loader(batches, original, loader, dataset, batch_size, args, kwargs)


def make_loader(batches: Batches, original, loader, dataset, batch_size: int | None, args: tuple, kwargs: dict) -> None:
    """A loader of the script, of less data, in batches that the processes share."""
    names = dict(zip(("shuffle", "sampler", "batch_sampler"), args, strict=False)) | kwargs
    own = names.get("batch_sampler")
    given = batch_size if own is None else None
    if own is None and not batches.cut_indices(names.get("sampler")):
        dataset = batches.cut(dataset)
    _, length, is_part = batches.cuts.get(id(dataset), (None, None, False))
    key = batches.key(length)
    if given is not None:
        batch_size = batches.batch_size(given, key, is_whole=names.get("sampler") is None and not is_part)
    elif isinstance(getattr(own, "batch_size", None), int):
        own.batch_size = batches.batch_size(own.batch_size, key)
    original(loader, dataset, batch_size, *args, **with_one_worker(batches, kwargs))
    is_iterable = isinstance(loader.dataset, torch_data.IterableDataset)
    if is_iterable:
        loader.collate_fn = Tagged(loader.collate_fn, are_batches=loader.batch_size is None)
    sampler = loader.sampler if own is None else getattr(own, "sampler", own)
    kind = type(sampler).__name__
    facts = {"given": given, "length": length, "is_part": is_part, "sampler": kind, "is_iterable": is_iterable}
    facts |= {"items": None if length is None else len(loader.dataset), "drop_last": drops_last(loader)}
    batches.new_loader(loader, key, shuffles=getattr(sampler, "shuffle", kind == "RandomSampler"), **facts)
    with contextlib.suppress(AttributeError):
        sampler.prove_key = loader.prove_key


def with_one_worker(batches: Batches, options: dict) -> dict:
    """The options of a loader that has at most one worker, which is forked: spawned ones have no wrappers."""
    if batches.plan.without_gpu:
        options = options | {"pin_memory": False}
    if not options.get("num_workers", 0):
        return options
    if seeds := seeds_of_workers(options.get("worker_init_fn")):
        batches.recording.facts.worker_seeds[batches.recording.where.line()] = seeds
    return options | {"num_workers": 1, "multiprocessing_context": "fork"}


def drops_last(loader: DataLoader) -> bool:
    return bool(loader.drop_last or getattr(loader.sampler, "drop_last", False))


def seeds_of_workers(init) -> str:
    """What the first worker draws with this worker_init_fn, if it draws the same after any other seed; else ""."""
    drawn = set()
    with contextlib.suppress(Exception):  # it may need to be in a worker
        for seed in (1, 2):
            with seeded(seed):
                init(0)
                drawn.add(digest(np.random.random()))
    return drawn.pop() if len(drawn) == 1 else ""


def made_again() -> DataLoader | None:
    """The loader in whose place Lightning is making another one, with a DistributedSampler."""
    frames = [sys._getframe(number) for number in range(3, 6)]
    makers = (frame for frame in frames if frame.f_code.co_name == "_reinstantiate_wrapped_cls")
    return next((frame.f_locals["orig_object"] for frame in makers), None)


def install_iterators(batches: Batches) -> None:
    recording = batches.recording

    @wrap(DataLoader, "__iter__")
    def iterate(original, loader):
        if batches.is_reading:
            return original(loader)
        if batches.end_passes(loader):
            return iter(())
        if batches.train_passes and not recording.step.micro_batches:
            recording.evaluations.note_draws(batches.draws())
        batches.expect_draws()
        iterator = original(loader)
        iterator.prove_pass = batches.begin_pass(loader)
        with contextlib.suppress(TypeError):  # of an IterableDataset
            iterator.prove_pass.length = len(loader)
        iterator.prove_later = getattr(loader, "prove_later", None)
        batches.expect_draws()
        return iterator

    @wrap(dataloader._BaseDataLoaderIter, "__next__")
    def next_batch(original, iterator):
        if batches.is_reading:
            return original(iterator)
        if batches.is_short(iterator):
            raise StopIteration
        try:
            with batches.reading() as draws:
                recording.evaluations.note_draws(draws)
                content = original(iterator)
        except StopIteration:
            batches.end_pass(getattr(iterator, "prove_pass", None) or batches.begin_pass(None))
            raise
        content, digests = batches.opened(content)
        if getattr(iterator, "prove_later", None) is None:
            current = getattr(iterator, "prove_pass", None) or batches.begin_pass(None)
            batches.deliver(current, digests, content)
        else:
            iterator.prove_later.append((iterator.prove_pass, digests))
        return content


def install_prepared_loaders(batches: Batches) -> None:
    """For loaders that Accelerate has prepared, which read one batch ahead."""
    import accelerate
    from accelerate import accelerator, data_loader

    for module in (accelerator, data_loader):
        for name in ("prepare_data_loader", "skip_first_batches"):

            @wrap(module, name)
            def prepared(original, *args, **kwargs):
                result = original(*args, **kwargs)
                loader = args[0] if args else kwargs["dataloader"]
                with contextlib.suppress(AttributeError):
                    result.prove_key = loader.prove_key
                    base = getattr(result, "base_dataloader", None)
                    if base is not None:
                        base.prove_key, base.prove_later = loader.prove_key, collections.deque()
                return result

    accelerate.skip_first_batches = data_loader.skip_first_batches

    def iterate(original, loader):
        if batches.end_passes(loader):
            return
        dispatches = isinstance(loader, data_loader.DataLoaderDispatcher)  # what one process reads for all
        waiting = loader.base_dataloader.__dict__.setdefault("prove_later", collections.deque())
        waiting.clear()
        batches.expect_draws()
        current = batches.begin_pass(loader if dispatches else None)
        for content in original(loader):
            if dispatches:
                batches.deliver(current, rows(content), content)
            elif waiting:
                current, digests = waiting.popleft()
                batches.deliver(current, digests, content)
            yield content
        batches.end_pass(current)

    for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        wrap(kind, "__iter__")(iterate)
