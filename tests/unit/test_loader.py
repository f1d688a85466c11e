"""Batches of any map-style dataset, the same on any number of processes, workers and steps."""

import collections
import dataclasses
import itertools
import math
import random
import re
import traceback

import datasets
import numpy as np
import pytest
import torch
from fakes import fake_accelerator
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from utils import agree
from utils import sampler as samplers
from utils.items import UnreadableItem
from utils.layout import Layout
from utils.loader import GlobalLoader, describe_data
from utils.randomness import combine, random_uniform
from utils.sampler import GlobalSampler, MicroBatch

TOPOLOGIES = [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1), (3, 5)]


MADE = []
OWN_GENERATOR = np.random.default_rng(0)


def make(dataset, batch_size=4, processes=1, rank=0, accumulation=1, seed=5, virtual=0, **options):
    accelerator = fake_accelerator(processes, rank, accumulation=accumulation, virtual_processes=virtual)
    MADE.append(GlobalLoader(dataset, batch_size, accelerator, seed=seed, **options))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _no_worker_left():
    """End the workers. The garbage collector would wait 5 s for each one after an error."""
    yield
    for each in MADE:
        workers = each.reader and each.reader._workers
        if workers is not None and workers._iterator is not None:
            workers._iterator._shutdown_workers()
    MADE.clear()


def by_step(processes, accumulation, epoch, first_step=0, **options):
    """The batches of each step, in the order in which the step is cut."""
    ranks = []
    for rank in range(processes):
        each = make(processes=processes, rank=rank, accumulation=accumulation, **options)
        ranks.append(list(each.epoch(epoch, first_step)))
    # One batch more on one rank would be a hang at the end of the epoch.
    assert {len(batches) for batches in ranks} == {(len(each) - first_step) * accumulation}
    steps = []
    for start in range(0, len(ranks[0]), accumulation):
        window = [batches[start : start + accumulation] for batches in ranks]
        assert [batch.micro_step for batch in window[0]] == list(range(accumulation))
        steps.append([batch for micro in zip(*window, strict=True) for batch in micro])
    return steps


# --- how a step is cut ------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("seed", [5, None])
def test_virtual_processes_get_the_same_parts_on_any_number_of_processes(processes, seed):
    def parts(processes):
        found = {}
        for rank in range(processes):
            loader = make(Noisy(50), batch_size=16, processes=processes, rank=rank, seed=seed, virtual=6)
            batches = list(loader.epoch(1, first_step=1))
            assert len(batches) == 3 * loader.sampler.accumulation
            parts = [batch.slot for batch in batches]
            assert parts == list(range(6 * rank // processes, 6 * (rank + 1) // processes)) * 3
            for number, batch in enumerate(batches):
                step = number // loader.sampler.accumulation
                found[step, batch.slot] = batch.data
                losses = torch.ones(len(batch))
                assert batch.mean_loss(losses) == pytest.approx(len(batch.counted(losses)) / (16, 16, 2)[step])
        return found

    expected, found = parts(1), parts(processes)
    assert found.keys() == expected.keys() == {(u, p) for u in range(3) for p in range(6)}
    for place, data in expected.items():
        for one, other in zip(data, found[place], strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_virtual_processes_take_turns_under_fsdp(processes):
    for rank in range(processes):
        accelerator = fake_accelerator(processes, rank, kind="FSDP", virtual_processes=6)
        batches = GlobalLoader(Noisy(50), 16, accelerator, seed=5).epoch()
        assert [batch.slot for batch in batches] == list(range(rank, 6, processes)) * 4


def indices(batches):
    return torch.cat([batch.counted(batch.indices) for batch in batches]).tolist()


class Squares(Dataset):
    """Items (i, i squared); counts the calls."""

    def __init__(self, length=23):
        self.length = length
        self.calls = collections.Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls["item"] += 1
        return index, float(index) ** 2


class BatchedSquares(Squares):
    def __getitems__(self, indices):
        self.calls["batch"] += 1
        return [(index, float(index) ** 2) for index in indices]


class Noisy(Squares):
    """Draws from all three global generators."""

    def __getitem__(self, index):
        self.calls["item"] += 1
        return index, torch.rand(2), random.random(), np.random.rand(3)


class OwnGenerator(Squares):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        return index, self.rng.random()


class Unreadable(Squares):
    bad = 13

    def __getitem__(self, index):
        if index == self.bad:
            raise UnreadableItem(f"photo {index} is no photo: remove it")
        return index


# --- which items ------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 7, 64, 65, 127, 1003])
@pytest.mark.parametrize(("processes", "accumulation"), TOPOLOGIES)
def test_each_sample_once_and_equal_steps_on_any_topology(samples, processes, accumulation):
    numbers = TensorDataset(torch.arange(samples))

    def steps(processes, accumulation, epoch):
        found = by_step(processes, accumulation, epoch, dataset=numbers, batch_size=60)
        for parts in found:
            sizes = [len(batch.counted(batch.indices)) for batch in parts]
            assert max(sizes) - min(sizes) <= 1
            assert {batch._step_samples for batch in parts} == {sum(sizes)}
            assert {batch.grad_divisor for batch in parts} == {processes * accumulation}
            assert all(torch.equal(batch.data[0], batch.indices) for batch in parts)
        return [indices(parts) for parts in found]

    ours = steps(processes, accumulation, epoch=2)
    assert ours == steps(1, 1, epoch=2)
    assert sorted(itertools.chain(*ours)) == list(range(samples))
    if samples > 60:
        assert ours != steps(processes, accumulation, epoch=3)


@pytest.mark.parametrize("length", [1003, 2**20 + 5])
def test_any_step_is_found_without_the_ones_before(length, monkeypatch):
    made = []
    monkeypatch.setattr(samplers, "MicroBatch", lambda *fields: made.append(MicroBatch(*fields)) or made[-1])
    sampler = GlobalSampler(length, 60, Layout(accumulation=2), seed=1)
    last = len(sampler) - 3
    tail = [piece.indices.tolist() for piece in sampler.micro_batches(4, first_step=last)]
    assert len(tail) == len(made) == 6
    if length == 1003:
        whole = [piece.indices.tolist() for piece in sampler.micro_batches(4)]
        assert whole[2 * last :] == tail
    assert list(sampler.micro_batches(4, first_step=len(sampler))) == []


def test_drop_last_leaves_out_the_smaller_step():
    each = make(TensorDataset(torch.arange(23)), 4, drop_last=True)
    assert len(each) == 5
    assert each.num_samples == 20
    assert {len(batch) for batch in each} == {4}


@pytest.mark.parametrize("max_samples", [None, 0, 10, 99])
def test_max_samples_takes_the_first_ones(max_samples):
    each = make(list(range(23)), max_samples=max_samples)
    expected = 10 if max_samples == 10 else 23
    assert each.num_samples == each.describe()["items"] == expected
    assert sorted(indices(each)) == list(range(expected))


# --- an order of the user's own ---------------------------------------------------------------


def drawn_with_repeats(epoch):
    return torch.multinomial(torch.arange(23.0), 30, replacement=True)  # item 0 is never drawn


@pytest.mark.parametrize(("processes", "accumulation"), TOPOLOGIES)
def test_an_order_may_repeat_and_leave_out_items_and_is_the_same_on_any_topology(processes, accumulation):
    options = {"dataset": Noisy(), "batch_size": 8, "order": drawn_with_repeats}
    plain, steps = by_step(1, 1, 1, **options), by_step(processes, accumulation, 1, **options)
    torch.default_generator.manual_seed(combine(5, 1))
    expected = drawn_with_repeats(1).split(8)
    assert list(map(indices, steps)) == list(map(indices, plain)) == [part.tolist() for part in expected]
    drawn, others = (
        torch.cat([b.counted(torch.cat([b.data[1], b.rand(2)], 1)) for b in itertools.chain(*each)])
        for each in (steps, plain)
    )
    assert torch.equal(drawn, others)
    assert drawn.shape == (30, 4)
    assert len(drawn.unique()) == 30 * 4  # occurrences of an item have different numbers
    resumed = by_step(processes, accumulation, 1, first_step=2, **options)
    assert list(map(indices, resumed)) == list(map(indices, steps[2:]))


def test_an_order_draws_from_any_global_generator_and_leaves_it_alone():
    def order(epoch):
        torch_s, python_s, numpy_s = torch.randperm(23), random.sample(range(23), 23), np.random.permutation(23)
        return [torch_s, python_s, numpy_s][epoch]  # a tensor, a list, an array

    each = make(Squares(), 23, order=order)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = [next(each.epoch(epoch)).indices.tolist() for epoch in (0, 1, 2, 1)]
    assert state[0].equal(torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert found[1] == found[3]
    assert len(set(map(tuple, found))) == 3
    assert found[0] == indices(make(Squares(), 23))  # a permutation drawn like this is the default
    assert found[0] != next(make(Squares(), 23, order=order, name="other").epoch()).indices.tolist()
    assert indices(make(Squares(), seed=None, order=lambda epoch: [3, 1])) == [3, 1]


def test_an_order_with_virtual_processes_and_a_smaller_last_step():
    for processes in (1, 2, 3):
        options = {"batch_size": 16, "virtual": 6, "order": lambda epoch: torch.arange(49, 14, -1)}
        ranks = [list(make(Noisy(50), processes=processes, rank=rank, **options)) for rank in range(processes)]
        read = sorted((index for batches in ranks for index in indices(batches)), reverse=True)
        assert read == list(range(49, 14, -1))
        each = make(Noisy(50), **options)
        assert (len(each), each.num_samples, each.describe()["items"]) == (3, 35, 50)


@pytest.mark.parametrize(
    "order",
    [
        lambda epoch: [0, 23],
        lambda epoch: [-1, 3],
        lambda epoch: torch.ones(23, dtype=torch.bool),
        lambda epoch: torch.zeros(5, 1, dtype=torch.int64),
        lambda epoch: [],
        lambda epoch: list(range(23 - epoch)),
        lambda epoch: OWN_GENERATOR.permutation(23),
    ],
)
def test_a_bad_order_is_refused(order, stops):
    assert stops(lambda: list(make(Squares(), order=order).epoch(2))).startswith("error: order(")


def test_the_order_is_part_of_what_is_compared():
    def facts(order):
        return describe_data({"train": make(Squares(), order=order)})

    known = facts(lambda epoch: [1, 2, 3])
    assert known == facts(lambda epoch: torch.arange(1, 4))
    for other in (None, lambda epoch: [1, 3, 2], lambda epoch: [1, 2, 3 + epoch]):
        assert facts(other) != known


def test_the_scale_of_loss_weights_changes_no_loss():
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0])
    large, small = (next(iter(make(Squares(), loss_weights=lambda d, s=s: s * (d[0] + 1)))) for s in (1.0, 1e-6))
    torch.testing.assert_close(small.mean_loss(losses), large.mean_loss(losses))


def test_loss_weights_cannot_be_combined_with_shards():
    """Samples would count once per process."""
    with pytest.raises(ValueError, match="cannot be combined with shard"):
        make(Squares(), shard=(0, 1), loss_weights=len)


def test_a_shard_in_the_place_of_the_processes():
    """Two copies of a model on two processes each: both processes of a copy read the same."""
    read = []
    for rank in range(4):
        each = make(list(range(23)), 4, processes=4, rank=rank, shard=(rank // 2, 2))
        read.append(indices(each))
    assert read[0] == read[1] != read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(23))


# --- any dataset ------------------------------------------------------------------------------


def hub_dataset():
    return datasets.Dataset.from_dict({"number": list(range(23)), "text": list("abcdefghijklmnopqrstuvw")})


def jitter(rows):
    return {"number": [number + random.random() for number in rows["number"]]}


DATASETS = {
    "dataset": (Squares, lambda data: data[0]),
    "list": (lambda: list(range(23)), lambda data: data),
    "range": (lambda: range(23), lambda data: data),
    "list of dicts": (lambda: [{"a": {"b": i}} for i in range(23)], lambda data: data["a"]["b"]),
    "tensors": (lambda: TensorDataset(torch.arange(23)), lambda data: data[0]),
    "subset": (lambda: Subset(Squares(99), range(23)), lambda data: data[0]),
    "subset of tensors": (lambda: Subset(TensorDataset(torch.arange(99)), range(23)), lambda data: data[0]),
    "hub": (hub_dataset, lambda data: data["number"]),
    "hub torch": (lambda: hub_dataset().with_format("torch"), lambda data: data["number"]),
    "hub transform": (lambda: hub_dataset().with_transform(jitter), lambda data: data["number"].floor().long()),
}


@pytest.mark.parametrize("name", DATASETS)
def test_any_map_style_dataset(name):
    build, numbers = DATASETS[name]
    found = []
    for processes, accumulation in ((1, 1), (2, 3)):
        steps = by_step(processes, accumulation, 1, dataset=build(), batch_size=6)
        for batch in itertools.chain(*steps):
            assert torch.equal(numbers(batch.data), batch.indices)
        found.append(list(map(indices, steps)))
    assert found[0] == found[1]
    assert sorted(itertools.chain(*found[0])) == list(range(23))


def test_a_tensor_dataset_whose_items_are_its_own_is_read_item_by_item():
    class Negative(TensorDataset):
        def __getitem__(self, index):
            (number,) = super().__getitem__(index)
            return -number, torch.rand(())

    each = make(Negative(torch.arange(23)))
    for batch in each:
        assert torch.equal(batch.data[0], -batch.indices)
    assert each.reader.fetcher.deterministic is False
    assert each.describe()["fingerprint"] != make(TensorDataset(torch.arange(23))).describe()["fingerprint"]


def test_tensors_that_would_fill_a_gpu_stay_on_the_cpu_with_the_same_batches(monkeypatch):
    """Only the question for the memory sees a GPU; the tensors stay where they are."""
    data = TensorDataset(torch.arange(50.0).view(10, 5), torch.arange(10))  # 280 bytes
    batches = {}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr("utils.items.send_to_device", lambda data, *_, **__: data)
    for free in (1119, 1120):
        loader = GlobalLoader(data, 4, fake_accelerator(device="cuda"), seed=5)
        assert (loader.tensors is None) == (free == 1119)
        batches[free] = [tensor for batch in loader for tensor in (*batch.data, batch.indices)]
    assert len(batches[1119]) == 9
    assert all(map(torch.equal, batches[1119], batches[1120]))


@dataclasses.dataclass
class Numbers:
    numbers: torch.Tensor
    texts: list

    def to(self, device, non_blocking=False):
        return dataclasses.replace(self, numbers=self.numbers.to(device, non_blocking=non_blocking))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_may_be_a_dataclass_that_can_move(workers, device):
    def collate(items):
        return Numbers(torch.tensor(items), list(map(str, items)))

    for rank in range(4):  # 6 items: the last step is a sample and three stand-ins
        options = {"num_workers": workers, "collate_fn": collate}
        accelerator = fake_accelerator(4, rank, device=device)
        MADE.append(GlobalLoader(list(range(5)), 4, accelerator, seed=5, **options))
        for batch in MADE[-1]:
            assert batch.data.numbers.device.type == device
            assert batch.data.texts == list(map(str, batch.indices.tolist() if device == "cpu" else batch.data.texts))
            assert len(batch.data.texts) == len(batch)


class Curriculum(Squares):
    """Items that change from epoch to epoch."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return index, self.epoch


class Wrapper(Squares):
    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]


class NewTensors(TensorDataset):
    def set_epoch(self, epoch):
        self.tensors = (torch.arange(23), torch.full((23,), epoch))


TOLD = {
    "bare": Curriculum,
    "subset": lambda: Subset(Curriculum(40), range(23)),
    "concatenated": lambda: ConcatDataset([Curriculum(11), Subset(Curriculum(20), range(12))]),
    "wrapped": lambda: Wrapper(Subset(Curriculum(), range(23))),
    "tensors": lambda: NewTensors(torch.arange(23), torch.zeros(23)),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", TOLD)
def test_a_dataset_is_told_the_epoch(name, workers):
    each = make(TOLD[name](), num_workers=workers)
    each.describe()
    for epoch, first_step in ((0, 0), (1, 0), (3, 4), (0, 5)):
        for batch in each.epoch(epoch, first_step):
            assert batch.data[1].tolist() == [epoch] * len(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_share_a_dataset_tell_it_their_own_epochs(workers):
    """As for a test between two epochs, or a second loader that is in a different epoch."""
    data = Curriculum()
    one, other = make(data, num_workers=workers), make(data, seed=None, num_workers=workers)
    for epoch in range(3):
        for batch, of_test in zip(one.epoch(epoch), other.epoch(), strict=True):
            assert set(batch.data[1].tolist()) == {epoch}
            assert set(of_test.data[1].tolist()) == {0}
    for _ in range(2):
        data.set_epoch(9)  # by the user
        assert {number for batch in one.epoch(2) for number in batch.data[1].tolist()} == {2}


class Holes(Squares):
    """Every fifth item cannot be read."""

    def __getitem__(self, index):
        return None if index % 5 == 0 else (torch.full((index,), 1.0), index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_leaves_out_items_ends_the_run(stops, workers):
    def collate(items):
        return default_collate([{"number": number} for _, number in filter(None, items)])

    each = make(Holes(), 10, num_workers=workers, collate_fn=collate)
    assert stops(list, each).startswith("error: collate_fn leaves out 3 of 10 items")


def replaced(items):
    return torch.tensor([0 if item is None else item[1] for item in items])


def packed(items):
    return torch.cat([item[0] for item in items if item], 0)[None], torch.tensor([item is None for item in items])


def names_first(items):
    return ["a name"] * len(items), replaced(items)


@pytest.mark.parametrize("collate_fn", [replaced, packed, names_first, list])
def test_a_collate_fn_that_makes_something_of_none_is_right(collate_fn):
    each = make(Holes(), 10, collate_fn=collate_fn)
    assert sum(len(batch) for batch in each) == 23


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (Stream(), "a Stream has no indices"),
        (hub_dataset().to_iterable_dataset(), "a IterableDataset has no indices"),
        ([], "--batch_size 4 is more than the 0 items of an epoch"),
        (range(3), "--batch_size 4 is more than the 3 items of an epoch"),
    ],
)
def test_an_unusable_dataset_is_an_error_of_one_line(stops, dataset, sentence):
    (line,) = stops(lambda: make(dataset, drop_last=True)).splitlines()
    assert line.startswith(f"error: {sentence}")


# --- random numbers ---------------------------------------------------------------------------


def items_read(steps):
    """By item: what was drawn for it."""
    found = {}
    for batch in itertools.chain(*steps):
        for place, index in enumerate(batch.indices.tolist()):
            found[index] = [part[place].tolist() for part in batch.data]
    return found


def test_what_items_draw_depends_on_nothing_but_seed_epoch_and_item():
    options = {"dataset": Noisy(), "batch_size": 6}
    plain = items_read(by_step(1, 1, 1, **options))
    assert len(plain) == 23
    assert len({item[2] for item in plain.values()}) == 23
    for processes, accumulation in TOPOLOGIES:
        assert items_read(by_step(processes, accumulation, 1, **options)) == plain
    for workers in (1, 2):
        assert items_read(by_step(1, 2, 1, num_workers=workers, **options)) == plain
    for first_step in range(4):
        resumed = items_read(by_step(1, 1, 1, first_step=first_step, **options))
        assert resumed == {index: plain[index] for index in resumed}
    for changed in ({"epoch": 2}, {"epoch": 1, "seed": 6}):
        other = items_read(by_step(1, 1, **changed, **options))
        assert all(item[1:] != plain[index][1:] for index, item in other.items())


class PromisedSquares(Squares):
    deterministic = True


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Squares, PromisedSquares, BatchedSquares, Noisy])
def test_reading_leaves_the_random_numbers_of_this_process_alone(kind, workers):
    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.randn(), torch.randn(1).item()

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    expected = [draw() for _ in range(6)]
    each = make(kind(), num_workers=workers)
    seed()
    each.describe()
    assert [draw() for _ in each.epoch(0)] == expected


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [BatchedSquares(), TensorDataset(torch.arange(23))], ids=["items", "tensors"])
def test_what_collate_fn_draws_is_new_in_each_batch_and_the_same_when_resuming(dataset, workers):
    def mask(items):
        return torch.rand(()), random.random(), np.random.rand()

    def drawn(epoch, first_step=0):
        each = make(dataset, 4, num_workers=workers, collate_fn=mask)
        return [tuple(map(float, batch.data)) for batch in each.epoch(epoch, first_step)]

    masks = drawn(0) + drawn(1)
    assert len(set(masks)) == len(masks) == 12
    assert drawn(0, 4) == masks[4:6]
    assert drawn(1) == masks[6:]


def test_collate_fn_does_not_draw_the_numbers_of_the_first_item_again():
    each = make(Noisy(), 4, collate_fn=lambda items: (items[0][1], torch.rand(2)))
    assert not any(torch.equal(*batch.data) for batch in each)


def test_the_random_numbers_of_a_batch_depend_on_its_samples():
    def numbers(processes, accumulation, first_step=0, epoch=1):
        steps = by_step(processes, accumulation, epoch, first_step, dataset=Squares())
        return [
            torch.cat([b.counted(torch.cat([b.rand(3), b.randn(3), b.rand(3, stream=1)], 1)) for b in parts])
            for parts in steps
        ]

    plain = numbers(1, 1)
    assert plain[0].shape == (4, 9)
    assert len(torch.cat([*plain, *numbers(1, 1, epoch=0)]).unique()) == 2 * 23 * 9
    for ours in (numbers(2, 1), numbers(2, 2), numbers(3, 1)):
        assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
    assert torch.equal(numbers(1, 2, first_step=5)[0], plain[5])


def test_loaders_of_different_names_have_orders_and_random_numbers_of_their_own(capsys):
    accelerator = fake_accelerator()
    settings = ((5, None), (5, "other"), (5, "more"), (6, "six"), (None, None), (None, "val"), (5, "test_too"))
    loaders = [GlobalLoader(Noisy(64), 64, accelerator, seed=seed, name=name) for seed, name in settings]
    assert list(accelerator.loaders) == ["train", "other", "more", "six", "test", "val", "test_too"]
    (batch,), *_ = found = [list(loader.epoch()) for loader in loaders]
    # A default name changes nothing: figures of the pages depend on it.
    assert torch.equal(batch.indices, torch.randperm(64, generator=torch.Generator().manual_seed(combine(5, 0))))
    assert torch.equal(batch.rand(2), random_uniform(combine(combine(5, 0, 3), 0), batch.indices, (2,)))
    (of_test,) = found[4]
    key = combine(combine(combine(-1, 0, 5), 0, 3), 0)
    assert torch.equal(of_test.rand(2), random_uniform(key, torch.arange(64), (2,)))
    shuffled = {tuple(batch.indices.tolist()) for (batch,) in found}
    assert len(shuffled) == 6  # those without a seed are in the order of the data
    drawn, in_loop = [], []
    for (batch,) in found:
        order = batch.indices.argsort()
        drawn.append(tuple(batch.data[2][order].tolist()))
        in_loop.append(batch.randn(2)[order])
    assert len(set(drawn)) == len(settings)
    assert not any(torch.isclose(one, other).all(1).any() for one, other in itertools.combinations(in_loop, 2))
    for seed, name in ((5, None), (6, None), (None, None), (None, "other"), (7, "test")):
        with pytest.raises(SystemExit):  # a forgotten name
            GlobalLoader(Noisy(64), 64, accelerator, seed=seed, name=name)
    assert capsys.readouterr().err.count("error: two loaders are named") == 5


@pytest.mark.parametrize("step", [0, 3, 5, 6, 14])
def test_a_second_loader_goes_on_from_any_step_of_the_run(step):
    each = make(Noisy(), 4, accumulation=2)
    epochs = [[batch.data[1].tolist() for batch in each.epoch(epoch)] for epoch in range(4)]
    found = [batch.data[1].tolist() for batch in itertools.islice(each.from_step(step), 9)]
    assert found == list(itertools.chain(*epochs))[2 * step : 2 * step + 9]


def test_whole_batches_are_asked_for_where_the_data_promise_to_draw_nothing():
    """A dataset may also say None to them."""
    plain, promised, none = BatchedSquares(), BatchedSquares(), BatchedSquares()
    promised.deterministic = none.deterministic = True
    none.__getitems__ = None
    for data, calls in ((plain, {"item": 23}), (promised, {"batch": 6}), (none, {"item": 23})):
        list(make(data).epoch(0))
        assert data.calls == calls


def test_an_item_with_a_generator_of_its_own_is_warned_about(capsys, monkeypatch):
    facts = make(OwnGenerator()).describe()
    assert facts["fingerprint"] == "differs"
    warning = capsys.readouterr().out
    assert re.match("warning: one of the items 0, [0-9, ]*, 22 differs when it is read twice", warning)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "x")
    make(OwnGenerator()).describe()
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    for data in (Noisy(), Squares(), hub_dataset().with_transform(jitter)):
        assert make(data).describe()["fingerprint"] != "differs"
    assert capsys.readouterr().out == ""


# --- workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_live_on_after_an_epoch_that_was_left_early(workers):
    plain = make(Noisy())
    each = make(Noisy(), num_workers=workers)
    epochs = [(0, 0, 2), (1, 0, 99), (1, 3, 99), (2, 0, 1), (3, 0, 0), (4, 0, 99)]
    pids = set()
    for epoch, first_step, count in epochs:
        batches = each.epoch(epoch, first_step)
        found = list(itertools.islice(batches, count))
        expected = list(itertools.islice(plain.epoch(epoch, first_step), count))
        assert [batch.data[1].tolist() for batch in found] == [batch.data[1].tolist() for batch in expected]
        pids.add(tuple(worker.pid for worker in each.reader._workers._iterator._workers))
    assert len(pids) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_is_an_error_of_one_line(stops, workers):
    data = Unreadable()
    assert "photo 13 is no photo: remove it" in stops(list, make(data, num_workers=workers))
    data.bad = 0
    assert "photo 0 is no photo: remove it" in stops(make(data).describe)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_that_raises_stop_iteration_does_not_end_the_epoch(workers, deterministic):
    class Exhausted(Squares):
        def __getitem__(self, index):
            return next(iter([]))

    data = Exhausted()
    data.deterministic = deterministic
    with pytest.raises(RuntimeError) as raised:
        list(make(data, num_workers=workers).epoch(0))
    assert "return next(iter([]))" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("dataset", [Squares(3), TensorDataset(torch.ones(3, 2))], ids=["items", "tensors"])
def test_a_process_without_a_sample_gets_a_real_one_of_no_weight(dataset):
    """3 items over 4 processes: the last one has none."""
    (one,), (stand_in,) = (make(dataset, processes=4, rank=rank).epoch(0) for rank in (0, 3))
    assert (one.is_stand_in, stand_in.is_stand_in) == (False, True)
    assert len(stand_in) == 1
    assert torch.equal(stand_in.rand(2), one.rand(2))
    losses = torch.full((1,), torch.nan, requires_grad=True)
    stand_in.mean_loss(losses).backward()
    assert losses.grad.tolist() == [0]
    assert stand_in.counted(losses).shape == (0,)
    assert one.counted(losses) is losses


# --- the mean over the step -----------------------------------------------------------------


@pytest.mark.parametrize("weigh", [None, lambda data: data[0] % 4])  # integers; some samples count nothing
@pytest.mark.parametrize(("processes", "accumulation"), TOPOLOGIES)
def test_the_parts_of_a_step_make_its_mean(threads, processes, accumulation, weigh):
    """Its weighted mean is sum(w l) / sum(w) over all ranks and micro-batches, of which the last ones are stand-ins.
    DDP divides the sum of the gradients by the processes, backward by the steps."""

    def batches_of(rank):
        options = {"processes": processes, "rank": rank, "accumulation": accumulation}
        each = make(Squares(), 9, loss_weights=weigh, **options)
        each.accelerator.reduce = lambda tensor, kind: sum(threads.exchange(tensor))
        return list(each)

    ranks = threads.run(processes, batches_of)
    for start in range(0, len(ranks[0]), accumulation):
        parts = [batch for batches in ranks for batch in batches[start : start + accumulation]]
        total = sum(batch.mean_loss(batch.data[1]) for batch in parts) / processes / accumulation
        weights = {i: i % 4 if weigh else 1 for i in indices(parts)}
        expected = sum(weight * i**2 for i, weight in weights.items()) / sum(weights.values())
        assert total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1])
def test_invalid_weights_are_refused(wrong):
    weights = [1, wrong, 2, 3]  # a list will do
    with pytest.raises(ValueError, match="loss_weights must return"):
        next(iter(make(Squares(), loss_weights=lambda data: weights)))


def test_a_step_of_no_weight_has_no_gradient():
    """Nor has a mean over no token, which is nan, as transformers' loss of texts that have no token to predict."""
    batch = next(iter(make(Squares(), loss_weights=lambda data: torch.zeros(len(data[0])))))
    losses, logits = torch.ones(4, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    batch.mean_loss(losses).backward()
    assert losses.grad.tolist() == [0, 0, 0, 0]
    mean = torch.nn.functional.cross_entropy(logits, torch.full((4,), -100))
    assert mean.isnan()
    batch.mean_loss(mean).backward()
    assert not logits.grad.any()


def test_a_scalar_is_the_mean_of_the_micro_batch_by_its_weights():
    batch = next(iter(make(Squares())))
    assert batch.mean_loss(torch.tensor(3.0)) == batch.mean_loss(torch.full((4,), 3.0))
    batch = next(iter(make(Squares(), loss_weights=lambda data: data[0] + 1)))
    losses, weights = torch.rand(4), batch.weights
    torch.testing.assert_close(batch.mean_loss((losses * weights).sum() / weights.sum()), batch.mean_loss(losses))


@pytest.mark.parametrize("shape", [(4, 1), (3,), (1, 4)])
def test_losses_and_weights_of_a_wrong_shape_are_refused(shape):
    batch = next(iter(make(Squares())))
    with pytest.raises(ValueError, match=r"one loss per sample, shape \(4,\)"):
        batch.mean_loss(torch.ones(shape))
    with pytest.raises(ValueError, match=r"one weight per sample, shape \(4,\)"):
        next(iter(make(Squares(), loss_weights=lambda data: torch.ones(shape))))


# --- what identifies the data -----------------------------------------------------------------


def fingerprint(data):
    return make(data).describe()["fingerprint"]


def test_the_fingerprint_of_tensors_is_of_all_of_them():
    images, labels = torch.arange(20.0).view(10, 2), torch.arange(10)
    known, changed = fingerprint(TensorDataset(images.clone(), labels)), images.clone()
    assert fingerprint(TensorDataset(images, labels)) == known
    changed[5, 1] += 1
    others = [(changed, labels), (images, labels.flip(0)), (images,)]
    assert known not in {fingerprint(TensorDataset(*tensors)) for tensors in others}


def test_the_fingerprint_of_other_data_is_their_own_or_of_some_items_with_the_first_and_last():
    assert fingerprint([*range(9)]) != fingerprint([*range(8)])
    changed = [fingerprint([*range(n), -1, *range(n + 1, 60)]) != fingerprint([*range(60)]) for n in range(60)]
    assert (changed[0], changed[-1]) == (True, True)
    assert 10 <= sum(changed) <= 16
    with_own = Squares()
    with_own.fingerprint = "abc"
    assert fingerprint(with_own) == "abc"
    assert fingerprint(Noisy()) == fingerprint(Noisy())  # random items, of the same seed


def test_the_facts_that_are_compared_when_resuming():
    settings = make(Squares(), 4, accumulation=2, processes=2).settings()
    assert settings == make(Squares(), 4).settings()
    for name, value in {"seed": 6, "batch_size": 6, "drop_last": True}.items():
        assert make(Squares(), **{"batch_size": 4, name: value}).settings() == {**settings, name: value}
    assert make(Squares(), max_samples=9).describe() != make(Squares()).describe()


def test_different_test_data_are_different_data():
    train, one, other = (TensorDataset(torch.full((3,), value)) for value in (0, 1, 2))
    facts = [describe_data({"train": make(train), "test": make(test)})["fingerprint"] for test in (one, other)]
    assert facts[0] != facts[1]


def test_an_order_is_compared_between_ranks_in_each_epoch(monkeypatch, capsys):
    each = make(Squares(), order=lambda epoch: torch.arange(23).roll(epoch))
    assert indices(each.epoch(5))[:2] == [18, 19]
    other_rank = ("beta", {"order(5) of the train loader": "0" * 16})
    monkeypatch.setattr(agree, "gather_object", lambda mine: [*mine, other_rank])
    with pytest.raises(SystemExit):
        each.epoch(5)
    assert "rank 1 on beta has order(5) of the train loader '0000000000000000', not " in capsys.readouterr().err
