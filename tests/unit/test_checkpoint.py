"""Checkpoints: whole or not there, of any number of models, and refused where they do not fit."""

import errno
import itertools
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import run_folders
import run_reader
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from fakes import fake_accelerator
from torch import nn

from utils import agree, checkpoint
from utils.checkpoint import Checkpoints, reading, save_model
from utils.checkpoint import folder as disk
from utils.checkpoint.folder import CheckpointError, newest_first, write_manifest
from utils.checkpoint.state import SavedTensor, files_to_write, tensor_parts


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def batch_norm_model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def one_cycle(rate=0.01, steps=50, **options):
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, **options)


def build(seed, accelerator, optimizer=torch.optim.AdamW, scheduler=None, model=batch_norm_model, **options):
    """A model, its optimizer and its schedule, prepared."""
    torch.manual_seed(seed)
    model = model()
    optimizer = optimizer(model.parameters(), **{"lr": 0.01, **options})
    prepared = accelerator.prepare(model, optimizer, (scheduler or one_cycle())(optimizer))
    return dict(zip(("model", "optimizer", "scheduler"), prepared, strict=True))


def mapped(folder) -> list[str]:
    """The files below a folder that this process has mapped: a run must not keep a checkpoint that it removes."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


class Waiting(Checkpoints):
    """Each save ends when it is on the disk."""

    def save(self, *args):
        super().save(*args)
        self.wait()


def checkpoints(accelerator, folder, state, invariants=None, **options):
    return Waiting(accelerator, folder / "checkpoints", state, invariants or {}, **options)


def train(accelerator, state, steps):
    optimizer, scheduler = state["optimizer"], state.get("scheduler")
    asks_again = isinstance(getattr(optimizer, "optimizer", None), torch.optim.LBFGS)
    for step in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = state["model"](inputs).square().sum()
            accelerator.backward(loss)
            return loss

        loss = closure()
        optimizer.step(closure if asks_again else None)
        if isinstance(getattr(scheduler, "scheduler", None), PLATEAU):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def assert_equal(one, other):
    """Parts of two checkpoints, by all that is in their states."""

    def to_json(value):
        return value.tolist() if isinstance(value, torch.Tensor) else repr(value)

    assert one.keys() == other.keys()
    for name in one:
        texts = [json.dumps(state[name].state_dict(), default=to_json, sort_keys=True) for state in (one, other)]
        assert texts[0] == texts[1], name


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


# --- what comes back --------------------------------------------------------------------------


def test_everything_that_a_step_needs_comes_back(tmp_path, accelerator):
    """Buffers of BatchNorm, moments, the schedule, a scaler, and what is JSON."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    first = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, first, {"data": "x"})
    train(accelerator, first, 7)
    saver.save(7, {"best": {"accuracy": [0.75, 3]}})
    train(accelerator, first, 5)

    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    second = build(1, accelerator)
    loaded = checkpoints(accelerator, tmp_path, second, {"data": "x"}).load()
    assert loaded == (7, {"best": {"accuracy": [0.75, 3]}})
    assert accelerator.scaler.get_scale() == 1024.0
    train(accelerator, second, 5)
    assert_equal(first, second)


def test_a_buffer_whose_type_changes_between_two_saves_is_saved_in_its_new_type(tmp_path, accelerator):
    model = nn.BatchNorm1d(2)
    saver = checkpoints(accelerator, tmp_path, {"model": model})
    saver.save(1, {})
    model.running_mean = torch.full((2,), 1 + 2**-40, dtype=torch.float64)
    saver.save(2, {})
    folder = tmp_path / "checkpoints" / "step_00000002"
    assert torch.equal(safetensors.torch.load_file(folder / "model.safetensors")["running_mean"], model.running_mean)


def lambda_lr(function):
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, function)


class Rate:
    """A factor of the learning rate with a state: how often it was called."""

    def __init__(self, decay):
        self.decay, self.calls = decay, 0

    def __call__(self, step):
        self.calls += 1
        return self.decay**self.calls


def in_sequence(optimizer):
    first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    inner = [first, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [9])


def channels_last_model():
    """Other strides of a moment than of its weight would give it another number's momentum: a fused step reads both
    side by side."""
    return nn.Sequential(nn.Unflatten(1, (2, 2, 1)), nn.Conv2d(2, 3, (2, 1))).to(memory_format=torch.channels_last)


PARTS = {
    "function": {"scheduler": lambda_lr(lambda step: 1 / (step + 1))},
    "object": {"scheduler": lambda opt: lambda_lr(Rate(0.5))(opt)},
    "plateau": {"scheduler": lambda opt: PLATEAU(opt, patience=1, factor=0.5)},
    "steps": {"scheduler": lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [3, 8])},
    "sequence": {"scheduler": in_sequence},
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9, "nesterov": True},
    "fused": {"optimizer": torch.optim.AdamW, "fused": True},
    "amsgrad": {"optimizer": torch.optim.Adam, "amsgrad": True, "betas": (0.8, 0.9)},
    "adafactor": {"optimizer": torch.optim.Adafactor, "scheduler": one_cycle(cycle_momentum=False)},
    "rate in a tensor": {"optimizer": lambda parameters, lr: torch.optim.Adam(parameters, torch.tensor(lr))},
    "lists of tensors": {"optimizer": torch.optim.LBFGS, "max_iter": 3, "scheduler": one_cycle(cycle_momentum=False)},
    "channels last": {"model": channels_last_model, "optimizer": torch.optim.SGD, "momentum": 0.9, "fused": True},
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_any_optimizer_and_schedule_goes_on(tmp_path, accelerator, name):
    first, second = build(0, accelerator, **PARTS[name]), build(1, accelerator, **PARTS[name])
    saver = checkpoints(accelerator, tmp_path, first)
    train(accelerator, first, 7)
    saver.save(7, {})
    assert checkpoints(accelerator, tmp_path, second).load()[0] == 7
    assert not mapped(tmp_path)
    for state in (first, second):
        train(accelerator, state, 5)
    assert_equal(first, second)
    groups = [state["optimizer"].param_groups[0] for state in (first, second)]
    assert [*map(type, groups[0].values())] == [*map(type, groups[1].values())]


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_layer(model):
    model[0] = torch.compile(model[0])
    return model


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled inside": lambda model: nn.DataParallel(torch.compile(model)),  # what DDP is put around
    "compiled in place": compile_in_place,
    "a layer compiled": compile_layer,
}


# --- names, rows and files --------------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPERS)
def test_names_are_those_of_the_bare_model(tmp_path, accelerator, name):
    """And a checkpoint goes from any of these to the bare model and back: no state is left out."""

    def built(seed, wrap=lambda model: model):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters())
        train(accelerator, {"model": model, "optimizer": optimizer}, seed)  # before a wrapper compiles it
        return {"model": wrap(model), "optimizer": optimizer}

    bare, wrapped = built(2), built(2, WRAPPERS[name])
    save_model(accelerator, wrapped["model"], tmp_path / "model.safetensors")
    model = built(0)["model"]
    model.load_state_dict(run_reader.weights(tmp_path), strict=True)
    for folder, state, other in (("to", wrapped, built(1)), ("from", bare, built(1, WRAPPERS[name]))):
        (tmp_path / folder).mkdir()
        checkpoints(accelerator, tmp_path / folder, state).save(2, {})
        _, tensors = run_reader.checkpoint(tmp_path / folder / "checkpoints" / "step_00000002")
        assert set(tensors["model.safetensors"]) == set(model.state_dict())
        names = {key.rpartition("/")[0] for key in tensors["optimizer.safetensors"]}
        assert names == {name for name, _ in model.named_parameters()}
        assert checkpoints(accelerator, tmp_path / folder, other).load()[0] == 2
        assert_equal({"optimizer": other["optimizer"]}, {"optimizer": bare["optimizer"]})
        for tensor, expected in zip(other["model"].state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(tensor, expected)


def test_rows_of_a_tensor_in_parts_are_read_from_the_files_that_have_them():
    whole = torch.arange(14.0).view(7, 2)
    stored = SavedTensor([whole[:3], whole[3:4], whole[4:], whole[7:]])
    assert torch.equal(stored.whole(), whole)
    assert stored.shape == (7, 2)
    for start in range(8):
        for end in range(start, 8):
            assert torch.equal(stored.slice_rows(start, end), whole[start:end])


@pytest.mark.parametrize(("replicas", "shards"), [(1, 3), (2, 3), (1, 12)])
def test_each_rank_writes_its_rows(tmp_path, replicas, shards):
    """1 row, which most ranks have nothing of, and what is not sharded. Of two replicas, the first one writes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = {"weight": torch.randn(2 * shards - 1, 3), "row": torch.randn(1, 4).bfloat16(), "mask": torch.rand(6) < 0.5}
    digests, parts = {}, []
    for rank in range(replicas * shards):
        torch.distributed.init_process_group("fake", rank=rank, world_size=replicas * shards, store=FakeStore())
        try:
            mesh, tensors = init_device_mesh("cpu", (replicas, shards) if replicas > 1 else (shards,)), dict(whole)
            for name in ("weight", "row"):
                rows, shard = whole[name].chunk(shards), rank % shards
                local = rows[shard] if shard < len(rows) else whole[name][:0]
                options = {"shape": whole[name].shape, "stride": whole[name].stride()}
                placements = [Replicate(), Shard(0)][-mesh.ndim :]
                tensors[name] = DTensor.from_local(local, mesh, placements, **options)
            files = {"model.safetensors": tensors}
            parts.append(tensor_parts(files))
            digests |= disk.write_files(tmp_path, files_to_write(files, parts[rank].difference(*parts[:rank]), rank))
        finally:
            torch.distributed.destroy_process_group()
    assert digests.keys() == {"model.safetensors", *(f"model.rank_{rank}.safetensors" for rank in range(1, shards))}
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    for name in digests:
        (tmp_path / name).rename(folder / name)
    write_manifest(folder / "manifest.json", {"format": disk.FORMAT, "step": 7, "sha256": digests})
    _, read = reading.read_checkpoint(folder)
    assert read["model.safetensors"].keys() == whole.keys()
    assert all(torch.equal(stored.whole(), whole[name]) for name, stored in read["model.safetensors"].items())


def test_a_file_is_the_one_that_safetensors_writes(tmp_path):
    tensors = {
        "b": torch.randn(3, 2),
        "mask": torch.rand(5) < 0.5,
        "a": torch.randn(2).double(),
        "step": torch.tensor(1.0),
    }
    tensors |= {"half": torch.randn(3).bfloat16(), "none": torch.empty(0, 2)}
    digests = disk.write_files(tmp_path, {"ours": tensors})
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digests == {"ours": run_reader.sha256(tmp_path / "ours")}


def exchange_by(threads, monkeypatch):
    """Objects go between the threads of this process."""
    monkeypatch.setattr(agree, "broadcast_object_list", lambda objects: threads.exchange(objects)[0])
    for module in (checkpoint, reading):
        monkeypatch.setattr(module, "gather_object", lambda values: [*itertools.chain(*threads.exchange(values))])


# --- several processes and machines -----------------------------------------------------------


def two_machines(folders, seed, **more):
    """By rank, a model and its checkpoints below a folder."""
    pairs = []
    for rank, folder in enumerate(folders):
        torch.manual_seed(seed)
        model, more = nn.Linear(8, 8), {"scaler": None, "unwrap_model": lambda model, **_: model, **more}
        state = {"model": model, "teacher": nn.Linear(2, 2)}
        saver = Checkpoints(fake_accelerator(2, rank, **more), folder / "checkpoints", state, {})
        pairs.append((model, saver))
    return pairs


def save_two_steps(saver, monkeypatch):
    """As if the second process had the same."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "gather_object", lambda values: values * 2)
        for step in (1, 2):
            saver.save(step, {})
            saver.wait()


def another_run(folder):
    """Whole, at the same step and of the same model."""
    rewrite(folder / "checkpoints" / "step_00000002", lambda manifest: manifest.update(extra={"of": "another run"}))


def damaged_copy(folder):
    """In the file that rank 1 checks."""
    flip_a_bit(folder / "checkpoints" / "step_00000002" / "teacher.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: None, ""),
        (shutil.rmtree, "2 is intact, but rank 1 cannot read it (manifest.json: [Errno 2] "),
        (
            lambda folder: shutil.rmtree(folder / "checkpoints"),
            "2 is intact, but rank 1 cannot read it (manifest.json: ",
        ),
        (damaged_copy, "2 is intact, but rank 1 cannot read it (teacher.safetensors: its SHA-256 is not the one"),
        (another_run, "step_00000002 is intact, but rank 1 cannot read it (it has a different one): all machines need"),
    ],
)
def test_a_run_is_resumed_by_machines_that_have_its_folder(tmp_path, threads, monkeypatch, capsys, change, sentence):
    """One that all see, or a copy on each; otherwise a sentence says so, and nothing is renamed."""
    folders = [tmp_path / "machine0", tmp_path / "machine1"]
    folders[0].mkdir()
    ((saved, saver), _), loaded = two_machines(folders, 0), two_machines(folders, 1)
    save_two_steps(saver, monkeypatch)
    shutil.copytree(*folders)
    change(folders[1])
    exchange_by(threads, monkeypatch)
    if sentence:
        with pytest.raises(SystemExit):
            threads.run(2, lambda rank: loaded[rank][1].load())
        assert sentence in capsys.readouterr().err
        assert names(folders[0]) == ["step_00000001", "step_00000002"]
    else:
        assert threads.run(2, lambda rank: loaded[rank][1].load()[0]) == [2, 2]
        assert all(torch.equal(model.weight, saved.weight) for model, _ in loaded)


@pytest.mark.parametrize("kind", ["MULTI_CPU", "FSDP"])
def test_a_new_run_needs_one_folder_only_if_all_ranks_write(tmp_path, threads, monkeypatch, capsys, kind):
    folders = [tmp_path / "machine0", tmp_path / "machine1"]
    folders[0].mkdir()
    pairs = two_machines(folders, 0, distributed_type=DistributedType(kind))
    exchange_by(threads, monkeypatch)
    if kind == "FSDP":
        with pytest.raises(SystemExit):
            threads.run(2, lambda rank: pairs[rank][1].load())
        assert f"rank 1 does not see {folders[1]}: all machines need to see one" in capsys.readouterr().err
    else:
        assert threads.run(2, lambda rank: pairs[rank][1].load()[0]) == [0, 0]


def test_stages_of_a_pipeline_are_written_by_the_ranks_that_have_them(tmp_path, threads, monkeypatch):
    """And joined when read, by one process or by stages. Here: two replicas of a pipeline of two stages."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    exchange_by(threads, monkeypatch)

    def built(seed, stages=("0", "1")):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        for name in {"0", "1"}.difference(stages):
            delattr(model, name)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, seed + len(parameter))
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def saver_of(state, processes=1, rank=0):
        more = {"scaler": None, "unwrap_model": lambda model, **_: model}
        saver = Checkpoints(fake_accelerator(processes, rank, **more), tmp_path / "checkpoints", state, {})
        saver.numbers = itertools.count()  # a process of its own
        return saver

    whole = built(0)
    saved, loaded = ([built(seed, str(rank % 2)) for rank in range(4)] for seed in (0, 1))
    for state in saved:  # the numbers of the whole model
        state["model"].load_state_dict(whole["model"].state_dict(), strict=False)

    def save_and_load(rank):
        saver = saver_of(saved[rank], 4, rank)
        saver.save(1, {})
        saver.wait()
        save_model(saver.accelerator, saved[rank]["model"], tmp_path / "model.safetensors")
        return saver_of(loaded[rank], 4, rank).load()[0]

    assert threads.run(4, save_and_load) == [1] * 4
    for one, other in zip(saved, loaded, strict=True):
        assert_equal(one, other)
    files = {path.name for path in (tmp_path / "checkpoints" / "step_00000001").glob("*.safetensors")}
    assert files == {f"{n}.safetensors" for n in ("model", "optimizer", "model.rank_1", "optimizer.rank_1")}
    one = built(1)
    assert threads.run(1, lambda _: saver_of(one).load()[0]) == [1]
    assert_equal(one, whole)
    final = run_reader.weights(tmp_path)
    assert final.keys() == whole["model"].state_dict().keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in whole["model"].state_dict().items())


# --- kills, and what is on the disk when ------------------------------------------------------


def build_two(seed, accelerator):
    """Two models that one optimizer trains, and whose parameters have the same names."""
    torch.manual_seed(seed)
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.Adam(nn.ModuleList(models).parameters(), 0.01)
    return dict(zip(("maker", "judge", "optimizer"), accelerator.prepare(*models, optimizer), strict=True))


def train_two(accelerator, state, steps):
    train(accelerator, {**state, "model": nn.Sequential(state["maker"], state["judge"])}, steps)


def test_killed_between_any_two_writes_no_part_is_newer_than_another(tmp_path, accelerator, monkeypatch):
    first, second = build_two(0, accelerator), build_two(0, accelerator)
    train_two(accelerator, first, 1)
    checkpoints(accelerator, tmp_path, first).save(1, {})
    train_two(accelerator, second, 2)
    calls = ["fsync"] + ["write_tensors", "fsync"] * len(second) + ["write_manifest"] + ["fsync"] * 3
    for allowed in range(len(calls)):
        saver, left = checkpoints(accelerator, tmp_path, second, keep=1), [allowed]

        def die_after(name, left=left):
            function = getattr(disk, name)

            def count(*args):
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return function(*args)

            return count

        with monkeypatch.context() as patch:
            for name in set(calls):
                patch.setattr(disk, name, die_after(name))
            with pytest.raises(KeyboardInterrupt):
                saver.save(2, {})
        loaded = build_two(7, accelerator)
        step = checkpoints(accelerator, tmp_path, loaded).load()[0]
        # The folder has its name after all but the last of these calls.
        assert step == (2 if allowed >= len(calls) - 1 else 1)
        assert_equal(loaded, {1: first, 2: second}[step])
        assert not list((tmp_path / "checkpoints").glob(".part_*"))


def test_the_main_process_alone_touches_the_disk(tmp_path, accelerator, monkeypatch):
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    saver.save(1, {})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(type(accelerator), "is_main_process", False)
    saver.save(2, {})
    save_model(accelerator, state["model"], tmp_path / "model.safetensors")
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, accelerator, monkeypatch):
    began, end, write = threading.Event(), threading.Event(), disk.write_tensors

    def write_slowly(*args):
        began.set()
        assert end.wait(60)
        return write(*args)

    monkeypatch.setattr(disk, "write_tensors", write_slowly)
    state, expected = build(0, accelerator), build(0, accelerator)
    saver = Checkpoints(accelerator, tmp_path / "checkpoints", state, {})
    train(accelerator, state, 3)
    train(accelerator, expected, 3)
    before = set(threading.enumerate())
    saver.save(3, {})
    assert began.wait(60)
    train(accelerator, state, 5)  # changes every tensor that is being written
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert not saver.failed()
    (writer,) = set(threading.enumerate()) - before
    end.set()
    saver.wait()
    writer.join(20)  # nothing is left to wait for: a process may go on to another run
    assert not writer.is_alive()
    loaded = build(1, accelerator)
    assert checkpoints(accelerator, tmp_path, loaded).load()[0] == 3
    assert_equal(loaded, expected)


def test_no_file_of_an_older_checkpoint_is_in_a_newer_one(tmp_path, accelerator):
    queue = Queue({"items": torch.ones(2)})
    saver = checkpoints(accelerator, tmp_path, {"queue": queue})
    saver.save(1, {})
    queue.state = {"items": None}
    saver.save(2, {})
    again = Queue({})
    assert checkpoints(accelerator, tmp_path, {"queue": again}).load()[0] == 2
    assert again.state == {"items": None}
    assert not (tmp_path / "checkpoints" / "step_00000002" / "queue.safetensors").exists()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, accelerator, monkeypatch):
    """And what `extra` speaks of before the manifest; then the name."""
    path, flushed, fsync = tmp_path / "checkpoints" / "step_00000001", [], os.fsync

    def record(descriptor):
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    saver.save(1, {}, lambda: flushed.append(("what extra speaks of", False)))
    assert flushed[:2] == [("what extra speaks of", False), (tmp_path.name, False)]
    assert sorted(flushed[2:-3]) == [(f"{n}.safetensors", False) for n in ("model", "optimizer")]
    assert flushed[-3:] == [("manifest.json", False), (".part_step_00000001", False), ("checkpoints", True)]


# --- models and objects of any kind -----------------------------------------------------------


def tied_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_are_saved_for_both_names_and_stay_tied(tmp_path, accelerator):
    first, second = (build(seed, accelerator, model=tied_model) for seed in (0, 1))
    saved(accelerator, tmp_path, first)
    checkpoints(accelerator, tmp_path, second).load()
    assert_equal(first, second)
    assert second["model"][0].weight is second["model"][1].weight
    save_model(accelerator, first["model"], tmp_path / "model.safetensors")
    assert run_reader.weights(tmp_path).keys() == first["model"].state_dict().keys()


class Queue:
    """An object of the user's, with tensors, numbers, and integer keys."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_of_your_own_comes_back(tmp_path, accelerator):
    state = {
        "keys": torch.arange(6).view(2, 3),
        "by_class": {3: torch.ones(2), 7: [1, 2.5, None, "x", True]},
        "nested": {"tensor": {"list": [torch.zeros(0), {"dict": float("inf")}]}},
    }
    checkpoints(accelerator, tmp_path, {"queue": Queue(state)}).save(1, {})
    queue = Queue({})
    assert checkpoints(accelerator, tmp_path, {"queue": queue}).load()[0] == 1
    assert str(queue.state) == str(state)
    assert not mapped(tmp_path)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Queue({"a": {"b": {1, 2}}}), "x/a/b cannot be saved: it is a set"),
        (Queue({"a": {(1, 2): 3}}), r"x/a cannot be saved: it is a dict with the keys \[\(1, 2\)\]"),
        (Queue({"a": torch.zeros(2).to(complex)}), "complex128"),  # which safetensors lacks
        (nn.Linear(2, 2, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_cannot_be_saved_is_named_at_the_start(tmp_path, accelerator, part, reason):
    with pytest.raises((SystemExit, KeyError), match=reason):
        checkpoints(accelerator, tmp_path, {"x": part})


# --- what does not fit ------------------------------------------------------------------------


@pytest.fixture
def refused(accelerator, tmp_path, stops):
    """What is said where a run cannot be resumed, with its folder left as it was."""

    def refused(state, facts=None) -> str:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        said = stops(checkpoints(accelerator, tmp_path, state, facts).load)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return said

    return refused


def saved(accelerator, folder, state, facts=None):
    saver = checkpoints(accelerator, folder, state, facts)
    train(accelerator, state, 2)
    saver.save(2, {})


def test_flags_and_data_must_be_the_same_flags_first(tmp_path, accelerator, refused):
    state, data = build(0, accelerator), {"train": 9, "file": Path("x")}
    saved(accelerator, tmp_path, build(0, accelerator), {"flags": {"lr": 0.1, "sizes": (1, 2)}, "data": data})
    same = {"flags": {"lr": 0.1, "sizes": [1, 2]}, "data": data}
    facts = {"flags": {"lr": 0.2, "sizes": [1, 3], "new": None}, "data": {"train": 8, "file": Path("x")}}
    assert "different arguments: lr was 0.1 and is 0.2; sizes.1 was 2 and is 3\n" in refused(state, facts)
    facts["flags"] = same["flags"]
    assert "different arguments: data.train was 9 and is 8\n" in refused(state, facts)
    assert "different arguments: data was " in refused(state, {"flags": same["flags"]})
    assert checkpoints(accelerator, tmp_path, state, same).load()[0] == 2


def of_groups(groups):
    """Three parameters in these groups of an SGD, which has no state that would tell."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    model.register_parameter("bias", model[1].bias)
    parameters = [model[0].weight, model[1].weight, model[1].bias]
    groups = [{"params": [parameters[i] for i in group]} for group in groups]
    return {"model": model, "optimizer": torch.optim.SGD(groups, 0.1)}


def built(**options):
    return lambda accelerator: build(0, accelerator, **options)


def only(model):
    return lambda _: {"model": model}


CHANGED = [
    (built(), built(**PARTS["plateau"]), "scheduler.class was 'OneCycleLR' and is 'ReduceLROnPlateau'"),
    (built(), built(scheduler=one_cycle(steps=60)), "scheduler.total_steps was 50 and is 60"),
    (
        built(),
        built(scheduler=one_cycle(pct_start=0.5)),
        "scheduler._schedule_phases.0.end_step was 14.0 and is 24.0",
    ),
    (built(), built(scheduler=one_cycle(0.02)), "optimizer.groups.0.max_lr was 0.01 and is 0.02"),
    (built(), built(optimizer=torch.optim.Adam), "optimizer.class was 'AdamW' and is 'Adam'"),
    (built(), built(eps=1e-6), "optimizer.groups.0.eps was 1e-08 and is 1e-06"),
    (only(nn.Linear(4, 2)), only(nn.Linear(4, 2).bfloat16()), "weight was 'float32 (2, 4)' and is 'bfloat16 (2, 4)'"),
    (only(nn.Linear(4, 3)), only(nn.Linear(4, 2)), "weight was 'float32 (3, 4)' and is 'float32 (2, 4)'"),
    (only(nn.Linear(4, 2)), only(nn.Linear(4, 2, bias=False)), "bias was 'float32 (2,)' and is None"),
    (only(nn.Identity()), only(nn.BatchNorm1d(2, affine=False)), "running_mean was None and is 'float32 (2,)'"),
    (lambda _: of_groups([[0, 1]]), lambda _: of_groups([[0, 1, 2]]), "optimizer.bias was None and is 'group 0'"),
    (
        lambda _: of_groups([[0, 1], [2]]),
        lambda _: of_groups([[0], [1, 2]]),
        "optimizer.1.weight was 'group 0' and is 'group 1'",
    ),
    (built(scheduler=lambda_lr(Rate(0.5))), built(scheduler=lambda_lr(Rate(0.7))), "decay was 0.5 and is 0.7"),
    (built(), lambda accelerator: build(0, accelerator) | {"ema": nn.Linear(1, 1)}, "and is 'ema, model, optimizer"),
]


@pytest.mark.parametrize(("then", "now", "sentence"), CHANGED)
def test_other_models_optimizers_and_schedules_are_refused(tmp_path, accelerator, refused, then, now, sentence):
    """Though the script did not declare anything."""
    checkpoints(accelerator, tmp_path, then(accelerator)).save(1, {})
    assert sentence in refused(now(accelerator))


def test_another_precision_is_refused(tmp_path, accelerator, refused, monkeypatch):
    saved(accelerator, tmp_path, build(0, accelerator))
    monkeypatch.setattr(type(accelerator), "mixed_precision", "bf16")
    assert "precision was 'no' and is 'bf16'" in refused(build(0, accelerator))


@pytest.mark.parametrize(("then", "now"), [(False, True), (True, False)])
def test_how_a_step_is_computed_may_change(tmp_path, accelerator, then, now):
    saved(accelerator, tmp_path, build(0, accelerator, fused=then))
    other = build(0, accelerator, fused=now)
    assert checkpoints(accelerator, tmp_path, other).load()[0] == 2
    assert other["optimizer"].param_groups[0]["fused"] is now


def test_a_run_of_another_length_goes_on_with_a_warning_where_no_schedule_knows_its_length(
    tmp_path, accelerator, refused, capsys
):
    """A function of the step may depend on it."""
    saved(accelerator, tmp_path, build(0, accelerator, **PARTS["function"]), {"total_steps": 40})
    for steps in (40, 60):
        longer = build(1, accelerator, **PARTS["function"])
        assert checkpoints(accelerator, tmp_path, longer, {"total_steps": steps}).load()[0] == 2
        found = re.findall(r"the run had 40 steps and now has (\d+)", capsys.readouterr().out)
        assert found == (["60"] if steps == 60 else [])
    assert "total_steps was 40 and is 1" in refused(build(1, accelerator, **PARTS["function"]), {"total_steps": 1})
    with pytest.raises(SystemExit):
        checkpoints(accelerator, tmp_path, build(1, accelerator, torch.optim.SGD), {"total_steps": 60}).load()
    assert "warning" not in capsys.readouterr().out  # the error is enough


def test_a_model_that_grew_after_the_start_is_refused_without_its_new_layer(tmp_path, accelerator, refused):
    model = nn.Sequential(nn.Linear(4, 2))
    saver = checkpoints(accelerator, tmp_path, {"model": model})
    model.append(nn.Linear(2, 2, bias=False))
    saver.save(1, {})
    assert "model.1.weight was 'float32 (2, 2)' and is None" in refused({"model": nn.Sequential(nn.Linear(4, 2))})


def rewrite(path, change):
    """Change the manifest of a checkpoint with `change(manifest)`, under a checksum that fits."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    write_manifest(path / "manifest.json", manifest)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, accelerator, monkeypatch):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator), keep=1)
    saver.save(1, {})

    def die(path, ignore_errors):
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            saver.save(2, {})
    assert [path.name for path in newest_first(saver.folder)] == ["step_00000002"]
    assert saver.load()[0] == 2
    assert names(tmp_path) == ["step_00000002"]


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path, accelerator, capsys):
    """Though the losses were: they were computed before the step."""
    state = {"teacher": nn.Linear(2, 2), "student": nn.Linear(2, 2)}
    state["student"].register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    saver = checkpoints(accelerator, tmp_path, state)
    saver.save(1, {})
    state["student"].bias.data[1] = torch.nan
    with pytest.raises(SystemExit):
        saver.save(2, {})
    assert "error: student.bias is not finite after step 2" in capsys.readouterr().err
    assert names(tmp_path) == ["step_00000001"]


def test_a_number_that_is_not_finite_is_found_in_the_rows_of_any_rank(tmp_path, accelerator):
    saver = checkpoints(accelerator, tmp_path, {"model": nn.Linear(2, 2)})
    saver.copies = {"model.rank_1.safetensors": {"weight": torch.tensor([1.0, torch.nan])}}
    with pytest.raises(CheckpointError, match=r"model\.weight is not finite after step 3"):
        saver._check_finite(3)


# --- what was damaged ---------------------------------------------------------------------------


def flip_a_bit(file):
    """Of the last number: all names and shapes are as before, and the SHA-256 alone tells."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose_the_content(file):
    """As a power cut does where a file was not flushed."""
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", run_folders.truncate),
        ("manifest.json", lambda file: file.write_text("null")),
        ("model.safetensors", flip_a_bit),
        ("optimizer.safetensors", lose_the_content),
        ("optimizer.safetensors", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, accelerator, capsys, name, damage):
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    for step in (1, 2):
        train(accelerator, state, step)
        saver.save(step, {})
    path = tmp_path / "checkpoints" / "step_00000002"
    damage(path / name)
    (tmp_path / "checkpoints" / "damaged_step_00000002").mkdir()  # by an earlier accident
    assert saver.load()[0] == 1
    said = capsys.readouterr().out
    assert said.startswith(f"warning: {path} is skipped: {name}: ")
    assert said.count("\n") == 1
    assert names(tmp_path) == ["damaged_step_00000002", "step_00000001"]


def test_what_cannot_be_read_for_the_moment_stays(tmp_path, accelerator, refused, monkeypatch):
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    for step in (1, 2):
        saver.save(step, {})

    def refuse(path, mode):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(reading.np, "memmap", refuse)
        assert "model.safetensors: Stale file handle" in refused(state)
    assert saver.load()[0] == 2


@pytest.mark.parametrize("number", [disk.FORMAT - 1, disk.FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_and_nothing_changes(
    tmp_path, accelerator, refused, monkeypatch, number
):
    """Not skipped as damaged, even if one that could be read is before or after it."""
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    saver.save(1, {})
    with monkeypatch.context() as patch:
        patch.setattr(disk, "FORMAT", number)
        saver.save(2, {})
    saver.save(3, {})
    run_folders.truncate(tmp_path / "checkpoints" / "step_00000003" / "model.safetensors")
    assert f"it was written by another version of the code (format {number}, " in refused(state)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
