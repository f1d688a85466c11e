"""What prove_training does with a script, and what it records of it."""

import argparse
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from prove_training.recording import data, files, noise, same_work, starting, where
from prove_training.recording.models import load_shared
from prove_training.records import Batch, Evaluation, Loader, MicroBatch, Part, Pass, Record, Step
from prove_training.stages import single
from prove_training.tensors import differ
from tests.made_up import made_recording, made_up


class Items(Dataset):
    def __init__(self, length):
        self.length, self.classes = length, ["cat", "dog"]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def test_a_cut_data_set_is_the_same_object_of_a_class_of_the_same_name():
    data = Items(100)
    assert same_work.cut(data, 10) is data
    assert len(data) == 10
    assert isinstance(data, Items)
    assert type(data).__name__ == "Items"
    assert data.classes == ["cat", "dog"]
    assert len(same_work.cut(Items(5), 10)) == 5


@pytest.mark.parametrize("data", [list(range(100)), tuple(range(100)), torch.arange(100)])
def test_a_list_or_tensor_is_cut_too(data):
    assert list(same_work.cut(data, 10)) == list(range(10))


@pytest.mark.parametrize("processes", [2, 3])
def test_a_part_made_by_hand_is_cut_to_its_share_and_its_batch_too(processes, tmp_path):
    indices = []
    for rank in range(processes):
        batches = made_recording(tmp_path, processes=processes, lengths={100, 40}, sizes={16}, rank=rank).batches
        indices += batches.cut(Subset(Items(100), range(rank, 100, processes))).indices
        assert len(batches.cut(Items(40))) == len(batches.cut(Items(100))) == 13
        assert batches.batch_size(16 // processes, "") == batches.batch_size(16, "") == 12 // processes
    assert sorted(indices) == list(range(13))


def test_clipping_nothing_or_gradients_that_are_still_scaled_is_recorded(tmp_path):
    models = made_recording(tmp_path, processes=1).models
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    models.optimizers = [first, second]
    step, both = models.recording.step, [first.param_groups[0]["params"][0], second.param_groups[0]["params"][0]]
    step.scaler = ["unscale_"]
    models.unscaled = {id(first)}
    models.clip(both[:1])
    assert step.scaler == ["unscale_", "clip"]
    models.clip(both)
    assert step.scaler == ["clip"]
    models.clip([])
    assert len(step.clips) == 3


def test_a_step_with_a_closure_has_the_gradients_that_the_closure_computes(tmp_path):
    recording = made_recording(tmp_path, processes=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def closure():
        parameter.grad = torch.full((2,), 3.0)

    args, kwargs = recording.models.before_step(optimizer, (optimizer, closure), {})
    assert args == (optimizer,)
    kwargs["closure"]()
    assert [value[1:].tolist() for value in recording.step.at_step.values()] == [[3, 3]]


@pytest.fixture
def models(tmp_path):
    """The recorder of models of a run on one process, with an optimizer of one parameter."""
    models = made_recording(tmp_path, processes=1).models
    models.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)]
    models.recording.where.line = lambda: "train.py:9"
    return models


@pytest.mark.parametrize(("epoch", "kept"), [(0, 2), (1, 1)])
def test_what_is_left_at_the_end_of_an_epoch_and_zeroed_is_dropped(models, monkeypatch, epoch, kept):
    parts = iter([Part("loader", 0, ["a"]), Part("loader", epoch, ["b"])])
    monkeypatch.setattr(models.batches, "of_backward", lambda: [next(parts)])
    models.begin_backward()
    models.parameters()[0].grad = torch.ones(2)
    models.before_zero_grad()
    models.begin_backward()
    assert len(models.recording.step.micro_batches) == kept


def test_gradients_are_zeroed_only_where_there_are_some(models):
    models.recording.step.micro_batches = [MicroBatch()]
    models.before_zero_grad()
    assert models.recording.step.zeroed == []
    models.parameters()[0].grad = torch.ones(2)
    models.before_zero_grad()
    assert models.recording.step.zeroed == [(1, "train.py:9")]


@pytest.mark.parametrize(
    ("name", "reduction", "target", "loss"),
    [
        ("cross_entropy", "mean", torch.tensor([1, 1, -100]), (1.0, 2, "train.py:9")),
        ("mse_loss", "sum", torch.zeros(3, 2), (6.0, 6, "train.py:9")),
    ],
)
def test_the_coefficient_and_the_number_of_losses_are_recorded(models, name, reduction, target, loss):
    models.recording.step.micro_batches = [MicroBatch()]
    args = torch.ones(3, 2, requires_grad=True), target
    value = getattr(torch.nn.functional, name)(*args, reduction=reduction)
    models.criterion(name, value, reduction, args, {})
    value.backward()
    assert models.recording.step.micro_batches[0].losses == [loss]


@pytest.mark.parametrize(("done", "before"), [(2, [7.0, 7.0]), (1, [1.0, 1.0])])
def test_gradients_before_clipping_are_kept_unless_it_came_too_early(models, done, before):
    step, parameter = models.recording.step, models.parameters()[0]
    step.micro_batches, parameter.grad = [MicroBatch()] * done, torch.full((2,), 7.0)
    models.clip([parameter])
    step.micro_batches, parameter.grad = [MicroBatch()] * 2, torch.ones(2)
    models._note_gradients(models.optimizers[0])
    assert [value[1:].tolist() for value in step.gradients.values()] == [before]


@pytest.mark.parametrize(("size", "value"), [(2, 1.0), (3, 0.0)])
def test_weights_are_shared_only_where_they_have_the_same_shapes(models, tmp_path, size, value):
    torch.save(([torch.ones(size)], [{}]), tmp_path / "weights.pt")
    models.plan.weights = {0: str(tmp_path / "weights.pt")}
    models.share_weights(0, models.optimizers)
    assert models.parameters()[0].tolist() == [value] * 2


def test_parameters_without_a_gradient_are_named_by_their_numbers_among_those_that_train(models):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1))
    models.in_ddp[0] = model
    error = "Parameter indices which did not receive grad for rank 0: 1 7"
    assert models.unused(error) == ["1.bias"]
    assert models.unused("another error") == []


@pytest.mark.parametrize(("rate", "modes"), [(0.0, {}), (0.5, {0: False})])
def test_the_mode_of_a_model_matters_only_with_layers_that_differ_in_it(models, rate, modes):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(rate)).eval()
    models.models[0] = model
    assert models.modes([*model.parameters()]) == modes


def test_the_last_batch_of_a_loader_that_reads_ahead_is_of_its_pass(models):
    batches, ended = models.batches, Pass("loader", read=[["a"], ["b"]], used=[Part("loader", 0, ["?"])])
    batches.read_to_end = ended
    assert [part.digests for part in batches.of_backward()] == [["b"]]
    assert ended.used[0].digests == ["a"]
    batches.read_to_end = replace(ended, read=[["a"], ["b"], ["c"]], used=ended.used[:1])
    assert batches.of_backward() == [], "two batches have not been used"


def test_a_part_of_the_test_data_has_a_part_of_the_batch(tmp_path):
    batches = made_recording(tmp_path, processes=2, tests={"test": 16}, sizes={16}).batches
    assert [batches.batch_size(8, "test", is_whole) for is_whole in (False, True)] == [6, 12]


@pytest.mark.parametrize(("length", "most"), [(None, 3), (20, 3), (4, 2), (1, 1)])
def test_a_shortened_test_reads_three_batches_or_half_of_them(tmp_path, length, most):
    batches = made_recording(tmp_path, processes=1, shorter=["test"]).batches
    for key, expected in (("test", [False] * most + [True]), ("loader", [False] * (most + 1))):
        current = Pass(key, length=length)
        read = [argparse.Namespace(prove_pass=current, _num_yielded=number) for number in range(most + 1)]
        assert list(map(batches.is_short, read)) == expected


def test_a_pass_is_whole_after_its_last_batch_and_batches_of_a_test_are_dropped(tmp_path):
    batches, current = made_recording(tmp_path, processes=1).batches, Pass("loader", length=2)
    batches.deliver(current, ["a"], torch.ones(1))
    assert not current.is_whole
    batches.fresh[0].is_tested = True
    batches.deliver(current, ["b"], torch.ones(1))
    assert current.is_whole
    assert [batch.digests for batch in batches.fresh] == [["b"]]


def test_weights_that_are_averaged_after_a_step_are_told_from_other_sums(tmp_path):
    recording = made_recording(tmp_path, processes=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    recording.models.optimizers = [torch.optim.SGD([parameter], lr=0.1)]
    recording.steps.append(Step())
    with recording.processes.calling("all_reduce", (torch.ones(2),)):
        pass
    recording.evaluations.current = Evaluation(1, "train.py:7")
    recording.processes.note_broadcast(torch.ones(2))
    assert [name for name, _ in recording.evaluations.current.collectives] == ["broadcast"]
    recording.evaluations.current = None
    assert not single.cannot_judge(Record(0, recording.facts, made_up()[0].steps))
    recording.where.line = lambda: "train.py:9"
    with recording.processes.calling("all_reduce", (parameter.data,)):
        pass
    assert "averages or exchanges the weights" in single.cannot_judge(Record(0, recording.facts, made_up()[0].steps))


def test_random_numbers_of_the_first_step_after_an_evaluation_are_not_of_the_evaluation(tmp_path):
    """As those of a detection model, which draws the boxes that it learns from."""
    recording = made_recording(tmp_path, processes=1)
    recording.facts.loaders["train.py:5"] = Loader("train.py:5")
    recording.evaluations.current = Evaluation(0, "train.py:9")
    recording.batches.expect_draws()
    torch.rand(1)
    recording.models.begin_backward()
    assert recording.step.micro_batches[0].draws
    assert not recording.record.evaluations[0].draws


def test_lightning_has_a_device_for_each_process(tmp_path):
    class Fabric:
        __module__ = "lightning.fabric.fabric"

        def __init__(self, **options):
            self.options = options

    starting.watch_devices(Fabric, made_recording(tmp_path, processes=3))
    options = {"accelerator": "cpu", "devices": 3, "num_nodes": 1, "precision": "32-true", "strategy": "ddp"}
    assert Fabric(accelerator="gpu", devices=1, precision="bf16-mixed").options == options
    assert Fabric(strategy="fsdp").options["strategy"] == "fsdp"
    strategy = argparse.Namespace(_accelerator="cuda", _parallel_devices=["cuda:0"])
    assert Fabric(strategy=strategy, accelerator="gpu").options["accelerator"] == "cpu"
    assert (strategy._accelerator, strategy._parallel_devices) == (None, None), "Lightning refuses two"


def test_batches_that_are_read_before_the_first_is_used_are_told_apart_by_their_memory(tmp_path):
    batches = made_recording(tmp_path, processes=1).batches
    batches.new_loader(argparse.Namespace(), "any")
    ids, masks, targets = torch.arange(12).view(3, 4), torch.ones(3, 4), torch.arange(3.0)
    first, second = (batches.begin_pass(argparse.Namespace(prove_key=key)) for key in ("ids", "targets"))
    for number in range(3):
        batches.deliver(first, [f"ids {number}"], {"ids": ids[number], "more": [masks[number]]})
    batches.deliver(second, ["targets"], (targets,))

    def used(*inputs) -> list:
        batches.model_called(list(inputs))
        return [part.digests for part in batches.of_backward()]

    assert used({"ids": ids[0, :-1]}, targets) == [["ids 0"], ["targets"]]
    assert used({"ids": ids[0]}) == [], "another loss of the same samples"
    assert used(masks[1]) == [["ids 1"]]
    assert used(ids[2] / 2) == [["ids 2"]], "what was computed is of the last batch"
    batches.deliver(first, ["ids 0"], {"ids": ids[0]})
    batches.deliver(first, ["ids 1"], {"ids": ids[1]})
    assert used(ids[1]) == [["ids 1"]]
    assert used(ids[2] / 2) == [], "the script has skipped it"
    batches.deliver(first, ["ids 0"], {"ids": ids[0]})
    batches.deliver(first, ["ids 1"], {"ids": ids[1]})
    batches.model_called([ids[0]])
    assert used(ids[0] / 2) == [["ids 0"]], "the second call has what was computed of the first"


def test_a_run_that_will_be_resumed_goes_on_after_the_first_file(tmp_path):
    recording = made_recording(tmp_path, processes=1, stop_after_save=True)
    recording.steps.append(Step())
    recording.end = lambda: pytest.fail("files that are written after the first one are missing")
    files.saved(recording)
    assert recording.facts.has_saved


@pytest.mark.parametrize(
    ("content", "has", "counters"),
    [
        (3, set(), []),
        ({1: 3, "losses": [0.5, 0.25]}, set(), ["1"]),
        ({"epoch": 1, "optimizer_states": [{"state": {}, "param_groups": []}]}, {"optimizer"}, ["epoch"]),
    ],
)
def test_any_content_of_a_file_can_be_described(content, has, counters):
    found = files.described(content)
    assert (found["has"], found["prefix"], found["counters"]) == (has, "", counters)


def test_the_indices_of_a_sampler_are_cut_and_not_the_data(tmp_path):
    """As those of a fold of a cross-validation."""
    batches = made_recording(tmp_path, processes=1).batches
    sampler = SubsetRandomSampler(range(50, 100))
    assert batches.cut_indices(sampler)
    assert list(sampler.indices) == list(range(50, 63))
    assert not batches.cut_indices(None)
    assert not batches.cut_indices(DistributedSampler(Items(50), 2, 0))


@pytest.mark.parametrize(("own_generator", "expected"), [(False, [2, 0, 1]), (True, [0, 1, 2])])
def test_a_shuffle_with_a_generator_of_the_script_keeps_its_own_order(own_generator, expected, tmp_path):
    """One that each process seeds for itself would be hidden by the order of one process."""
    batches = made_recording(tmp_path, processes=2, orders={"train.py:5": [[2, 0, 1]]}).batches
    sampler = RandomSampler(range(3))
    sampler.prove_key, sampler.prove_generator = "train.py:5", own_generator
    assert batches.order(sampler, lambda: [0, 1, 2]) == expected


@pytest.mark.parametrize(("number", "is_share"), [(31, False), (32, True), (33, True), (34, True), (35, False)])
def test_a_share_by_hand_may_differ_by_one(number, is_share, tmp_path):
    batches = made_recording(tmp_path, processes=3, lengths={100, 31}).batches
    assert batches.whole(number, "lengths") == (100 if is_share else None)
    assert batches.whole(100, "lengths") is None


def test_each_pass_has_its_own_order_of_the_reference_if_it_has_as_many_items(tmp_path):
    batches = made_recording(tmp_path, processes=2, orders={"train.py:5": [[2, 0, 1], [1, 2, 0], [1, 0]]}).batches
    sampler = RandomSampler(range(3))
    sampler.prove_key, sampler.prove_generator = "train.py:5", False
    orders = [batches.order(sampler, lambda: [0, 1, 2]) for _ in range(4)]
    assert orders == [[2, 0, 1], [1, 2, 0], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("given", "total"), [(64, 12), (12, 12), (8, 6), (1, 6)])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_batch_of_all_processes_is_the_same_on_each_number_of_them(given, total, processes, tmp_path):
    recording = made_recording(tmp_path, processes=processes, tests={"test": given})
    assert recording.batches.batch_size(given, "train") * processes == total
    assert recording.batches.batch_size(given, "test") == total
    recording.plan.sizes = {given}
    assert recording.batches.batch_size(given // processes or 1, "test", is_whole=True) == total
    recording.batches.splits_batches = True
    assert recording.batches.batch_size(given, "train") == total


def test_two_processes_do_not_divide_an_epoch():
    assert len(DistributedSampler(Items(same_work.items_of_epoch()), 2, 0)) * 2 > same_work.items_of_epoch()


@pytest.mark.parametrize(
    ("init", "is_alike"),
    [
        (lambda worker: np.random.seed(worker), True),
        (lambda worker: np.random.seed((torch.initial_seed() + worker) % 2**32), False),
        (lambda worker: 1 / 0, False),
        (None, False),
    ],
)
def test_workers_that_are_seeded_by_their_number_alone_are_known(init, is_alike):
    state = np.random.get_state()[1].tolist()
    assert bool(data.seeds_of_workers(init)) == is_alike
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("given", [16, 6])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("drops", [False, True])
def test_an_epoch_has_as_many_steps_on_each_number_of_processes(given, processes, drops):
    """Also without the last batch, whether a sampler or Accelerate divides the data."""
    items, total = Items(same_work.items_of_epoch()), same_work.micro_batch(given)
    expected, own = len(DataLoader(items, total, drop_last=drops)), total // processes
    assert len(items) % total > 1, "BatchNorm needs two samples"
    for sampler_drops in (False, True):
        sampler = DistributedSampler(items, processes, 0, drop_last=sampler_drops)
        assert len(DataLoader(items, own, sampler=sampler, drop_last=drops)) == expected
    batches = BatchSampler(range(len(items)), own, drops)
    assert len(BatchSamplerShard(batches, processes, 0)) == expected


def test_running_statistics_that_are_synchronised_are_not_compared(tmp_path):
    models = made_recording(tmp_path, processes=1).models
    models.models[0] = torch.nn.ModuleList([torch.nn.SyncBatchNorm(2), torch.nn.BatchNorm1d(2)])
    assert [name for name, _ in models._statistics()] == ["1.running_mean", "1.running_var"]


@pytest.mark.parametrize(
    "generator", [np.random.RandomState(), np.random.default_rng(), random.Random(), torch.Generator()]
)
def test_a_generator_that_a_transform_holds_is_seeded(generator):
    items, transform = Items(5), argparse.Namespace(generator=generator)
    items.transform = argparse.Namespace(transforms=[print, transform])
    assert list(same_work.generators_in(items)) == [generator]

    def draw() -> float:
        return (
            torch.rand(1, generator=generator).item() if isinstance(generator, torch.Generator) else generator.random()
        )

    drawn = []
    for seed in (1, 1, 2):
        same_work.seed_generator(generator, seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]


def test_noise_of_a_sample_is_the_same_in_each_part_of_a_batch(tmp_path):
    recording, drawn = made_recording(tmp_path, processes=1), []
    for samples in (["a", "b", "c"], ["c", "a"], ["b"]):
        batch = Batch(Pass("loader"), samples)
        recording.batches.fresh, recording.step = [batch], Step()
        draws, rows = noise.Noise(recording), len(samples)
        shifts = torch.tensor([[ord(sample)] for sample in samples], dtype=torch.float)
        made = [
            draws.draw(torch.randn, "randn", (rows, 2), {}),
            draws.draw(torch.rand, "rand", (rows,), {"generator": torch.Generator().manual_seed(rows)}),
            draws.draw(torch.randint, "randint", (3, 9, (rows,)), {}),
            draws.draw(torch.randint_like, "randint_like", (torch.zeros(rows), 4), {}),
            draws.draw(torch.normal, "normal", (shifts, 0.5), {}),
            draws.draw(torch.bernoulli, "bernoulli", (shifts / 200,), {}),
            draws.draw(torch.Tensor.uniform_, "uniform_", (torch.empty(rows, 2), 5.0, 6.0), {}),
            draws.draw(torch.Tensor.exponential_, "exponential_", (torch.empty(rows),), {"lambd": 2.0}),
        ]
        assert [draw.is_repeated for draw in recording.step.drawn] == [True] * len(made)
        drawn.append([dict(zip(samples, numbers.tolist(), strict=True)) for numbers in made])
    for whole, *parts in zip(*drawn, strict=True):
        assert whole == parts[0] | parts[1]
        assert whole["a"] != whole["b"] or {*map(float, whole.values())} <= {*map(float, range(9))}
    assert len({str(row) for row in drawn[0][0].values()}) == 3
    assert all(3 <= number < 9 for number in drawn[0][2].values())
    assert 90 < drawn[0][4]["a"][0] < 105
    assert all(5 <= each <= 6 for row in drawn[0][6].values() for each in row)
    state = torch.get_rng_state()
    first = draws.draw(torch.randn, "randn", (1,), {})
    torch.set_rng_state(state)
    assert torch.equal(draws.draw(torch.randn, "randn", (1,), {}), first), "as a checkpointed part draws again"
    assert not torch.equal(draws.draw(torch.randn, "randn", (1,), {}), first)
    draws.draw(torch.randn, "randn", (7, 2), {})
    assert not recording.step.drawn[-1].is_repeated


@pytest.mark.parametrize("has_loader", [True, False])
def test_a_coin_for_a_batch_is_that_of_the_step(tmp_path, has_loader):
    """Without a loader, a single number may choose the samples."""
    recording, thrown = made_recording(tmp_path, processes=1), []
    recording.facts.loaders |= {"loader": Loader("train.py:5")} if has_loader else {}
    for samples in (["a", "b"], ["c", "d", "e"]):
        recording.batches.fresh, recording.step = [Batch(Pass("loader"), samples)], Step()
        thrown += [noise.Noise(recording).draw(torch.rand, "rand", (1,), {}).item() for _ in range(2)]
        assert [draw.is_repeated for draw in recording.step.drawn] == [has_loader] * 2
    assert (thrown[:2] == thrown[2:]) == has_loader
    assert thrown[0] != thrown[1]
    recording.steps.append(Step())
    recording.batches.fresh = [Batch(Pass("loader"), samples)]
    assert noise.Noise(recording).draw(torch.rand, "rand", (1,), {}).item() not in thrown


def test_two_loaders_that_a_library_makes_in_one_line_have_different_names():
    def make():
        return where.Where("/of/the/script").place()

    def for_training():
        return make()

    def for_testing():
        return make()

    names = [function() for function in (for_training, for_testing) for _ in range(2)]
    assert names[0] == names[1] != names[2] == names[3]


def test_loaders_of_one_line_are_told_apart_by_the_length_of_their_data(tmp_path):
    batches = made_recording(tmp_path).batches
    names = [batches.key(length) for _ in range(2) for length in (300, 100)]  # of two epochs
    assert names[0] == names[2] != names[1] == names[3]


@pytest.mark.parametrize(("name", "prefix"), [("module.bias", "module."), ("bias", "")])
def test_a_prefix_is_one_of_all_names(name, prefix):
    assert files.described({"model": {"module.weight": torch.ones(1), name: torch.ones(1)}})["prefix"] == prefix


def test_a_number_that_is_none_is_only_equal_to_another_one():
    none, one = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])
    assert (differ(none, none), differ(one, one)) == (0.0, 0.0)
    assert (differ(none, one), differ(one, none)) == (torch.inf, torch.inf)


def test_weights_and_the_state_of_the_optimizer_are_taken_over():
    parameters, state = [torch.zeros(2)], {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}
    load_shared(parameters, [state], [torch.ones(2)], [{"exp_avg": torch.full((2,), 3.0), "step": torch.tensor(7.0)}])
    assert parameters[0].tolist() == [1, 1]
    assert (state["exp_avg"].tolist(), state["step"].item()) == ([3, 3], 7)


def test_random_items_are_the_same_in_each_process_and_told_as_random():
    class Random(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(3)

    fetcher = argparse.Namespace(auto_collation=True, dataset=Random(), collate_fn=list)
    state = torch.get_rng_state()
    tag, items, digests, is_random = same_work.fetch_with_digests(fetcher, [0, 1])
    assert is_random == {"draws_items", "ignores_index"}
    fetcher.dataset.__class__.__getitem__ = lambda _, index: torch.rand(3) + index
    del fetcher.has_read_twice
    assert same_work.fetch_with_digests(fetcher, [0, 1])[3] == {"draws_items"}
    fetcher.dataset.__class__.__getitem__ = lambda *_: torch.rand(3)
    assert tag == same_work.TAG
    torch.rand(5)
    again = argparse.Namespace(auto_collation=True, dataset=Random(), collate_fn=list)
    assert same_work.fetch_with_digests(again, [0, 1])[2] == digests
    assert torch.equal(same_work.fetch_with_digests(fetcher, [1])[1][0], items[1])
    torch.set_rng_state(state)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
