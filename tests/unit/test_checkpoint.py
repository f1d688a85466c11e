"""Checkpoints: whole or not there, of any number of models, and refused where they do not fit."""

import errno
import hashlib
import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from utils import checkpoint
from utils.checkpoint import ENTRIES, PROCESSES, Checkpoints, checksum, read_checkpoint, save_model
from utils.signals import launchers_patience_s


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def build(seed, accelerator, optimizer=torch.optim.AdamW, scheduler=None, **options):
    """A model with BatchNorm, its optimizer and its schedule, prepared."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = optimizer(model.parameters(), **{"lr": 0.01, **options})
    schedule = scheduler or (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.01, 50))
    prepared = accelerator.prepare(model, optimizer, schedule(optimizer))
    return dict(zip(("model", "optimizer", "scheduler"), prepared, strict=True))


class Waiting(Checkpoints):
    """Each save ends when it is on the disk."""

    def save(self, *words):
        super().save(*words)
        self.wait()


def checkpoints(accelerator, folder, state, fixed=None, **options):
    return Waiting(accelerator, folder / "checkpoints", state, fixed or {}, **options)


def train(accelerator, state, steps):
    for step in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = state["model"](inputs).square().sum()
        accelerator.backward(loss)
        state["optimizer"].step()
        scheduler = state.get("scheduler")
        if isinstance(getattr(scheduler, "scheduler", None), PLATEAU):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        if "model_ema" in state:
            state["model_ema"].update_parameters(state["model"])
        state["optimizer"].zero_grad()


def assert_equal(one, other):
    """Models by all their tensors, optimizers by all their state and hyperparameters."""
    assert one.keys() == other.keys()
    for name in one:
        if isinstance(one[name], nn.Module):
            states = one[name].state_dict(), other[name].state_dict()
            for key, tensor in states[0].items():
                assert torch.equal(tensor, states[1][key]), f"{name}.{key}"
        elif hasattr(one[name], "param_groups"):
            states = one[name].state_dict(), other[name].state_dict()
            assert str(states[0]["param_groups"]) == str(states[1]["param_groups"])
            for number, entries in states[0]["state"].items():
                for key, value in entries.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1]["state"][number][key])), (
                        f"{name} {number} {key}"
                    )


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


def test_everything_that_a_step_needs_comes_back(tmp_path, accelerator):
    """Buffers of BatchNorm, moments, the schedule, a scaler, metrics, and torch's generator."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    first = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, first, {"data": "x"})
    train(accelerator, first, 7)
    saver.save(7, {"indices": torch.tensor([15])}, {"best": {"accuracy": [0.75, 3]}})
    train(accelerator, first, 5)

    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    second = build(1, accelerator)
    step, extra, metrics = checkpoints(accelerator, tmp_path, second, {"data": "x"}).load()
    assert (step, extra) == (7, {"best": {"accuracy": [0.75, 3]}})
    assert metrics["indices"].tolist() == [15]
    assert accelerator.scaler.get_scale() == 1024.0
    train(accelerator, second, 5)
    assert_equal(first, second)


def test_without_a_checkpoint_it_is_step_0(tmp_path, accelerator):
    assert checkpoints(accelerator, tmp_path, build(0, accelerator)).load() == (0, {}, {})


def test_the_generators_of_torch_python_and_numpy_go_on(tmp_path, accelerator):
    """Also in the middle of a pair of normal numbers, of which Python and NumPy keep the second."""

    def draw():
        normals = random.gauss(0, 1), np.random.randn(), torch.randn(1).item()
        return [*normals, random.random(), np.random.rand(), torch.rand(1).item()]

    state = build(0, accelerator)
    for step, odd in enumerate((True, False)):
        if odd:
            random.gauss(0, 1)
            np.random.randn()
        (tmp_path / str(step)).mkdir()
        saver = checkpoints(accelerator, tmp_path / str(step), state)
        saver.save(1, {}, {})
        expected = [draw() for _ in range(3)]
        assert saver.load()[0] == 1
        assert [draw() for _ in range(3)] == expected


SCHEDULERS = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "plateau": lambda opt: PLATEAU(opt, patience=1, factor=0.5),
    "steps": lambda opt: torch.optim.lr_scheduler.MultiStepLR(opt, [3, 8]),
    "sequence": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.LinearLR(opt, total_iters=3), torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4])],
        [9],
    ),
    "cyclic": lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "restarts": lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_any_schedule_goes_on(tmp_path, accelerator, name):
    first = build(0, accelerator, scheduler=SCHEDULERS[name])
    saver = checkpoints(accelerator, tmp_path, first)
    train(accelerator, first, 7)
    saver.save(7, {}, {})
    second = build(1, accelerator, scheduler=SCHEDULERS[name])
    assert checkpoints(accelerator, tmp_path, second).load()[0] == 7
    for state in (first, second):
        train(accelerator, state, 5)
    assert_equal(first, second)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.9)}),
    "adafactor": (torch.optim.Adafactor, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on(tmp_path, accelerator, name):
    kind, options = OPTIMIZERS[name]
    constant = torch.optim.lr_scheduler.ConstantLR
    first = build(0, accelerator, kind, lambda opt: constant(opt, 1.0), **options)
    saver = checkpoints(accelerator, tmp_path, first)
    train(accelerator, first, 4)
    saver.save(4, {}, {})
    second = build(1, accelerator, kind, lambda opt: constant(opt, 1.0), **options)
    assert checkpoints(accelerator, tmp_path, second).load()[0] == 4
    for state in (first, second):
        train(accelerator, state, 3)
    assert_equal(first, second)
    group = second["optimizer"].param_groups[0]
    assert {key: type(value) for key, value in group.items()} == {
        key: type(value) for key, value in first["optimizer"].param_groups[0].items()
    }


def test_an_optimizer_whose_state_cannot_be_saved_is_named(tmp_path, accelerator, capsys):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    saver = checkpoints(accelerator, tmp_path, {"model": model, "optimizer": optimizer})
    optimizer.step(closure)
    with pytest.raises(SystemExit):
        saver.save(1, {}, {})
    assert "error: the optimizer LBFGS cannot be saved: its state " in capsys.readouterr().err


def test_moments_come_back_in_the_layout_of_their_weights(tmp_path, accelerator):
    """A fused step reads both side by side: other strides give a weight another one's momentum."""

    def build_convolution(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    def step(state):
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        accelerator.backward(state["model"](images).square().sum())
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    first, other = build_convolution(0), build_convolution(1)
    step(first)
    checkpoints(accelerator, tmp_path, first).save(1, {}, {})
    checkpoints(accelerator, tmp_path, other).load()
    for parameter, state in other["optimizer"].optimizer.state.items():
        assert state["momentum_buffer"].stride() == parameter.stride()
    for state in (first, other):
        step(state)
    assert_equal(first, other)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_names_are_those_of_the_bare_model(tmp_path, accelerator, wrap):
    state = build(0, accelerator)
    train(accelerator, state, 2)
    wrapped = {**state, "model": wrap(state["model"])}
    save_model(accelerator, wrapped["model"], tmp_path / "model.safetensors")
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).load_state_dict(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True
    )
    saver = checkpoints(accelerator, tmp_path, wrapped)
    saver.derived = checkpoints(accelerator, tmp_path, build(0, accelerator)).derived
    saver.save(2, {}, {})
    _, tensors = read_checkpoint(tmp_path / "checkpoints" / "step_00000002")
    assert set(tensors["model.safetensors"]) == set(state["model"].state_dict())
    assert "0.weight/exp_avg" in tensors["optimizer.safetensors"]
    other = build(1, accelerator)
    assert checkpoints(accelerator, tmp_path, other).load()[0] == 2
    assert_equal(state, other)


def test_the_newest_is_the_largest_number_and_not_the_last_name(tmp_path, accelerator):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator), keep=0)
    for step in (99_999_999, 100_000_000, 5):
        saver.save(step, {}, {})
    (tmp_path / "checkpoints" / "step_notes").mkdir()
    assert saver.complete_steps() == [100_000_000, 99_999_999, 5]
    assert saver.load()[0] == 100_000_000


# --- several models ---------------------------------------------------------------------------


def build_two(seed, accelerator):
    """A pair as in a GAN, each with an optimizer of its own, and a moving average of one."""
    torch.manual_seed(seed)
    models = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    average = AveragedModel(models[0], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    maker, judge, maker_optimizer, judge_optimizer = accelerator.prepare(*models, *optimizers)
    return {
        "maker": maker,
        "judge": judge,
        "maker_optimizer": maker_optimizer,
        "judge_optimizer": judge_optimizer,
        "maker_ema": average,
    }


def train_two(accelerator, state, steps):
    for step in range(steps):
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        for name, sign in (("judge", 1), ("maker", -1)):
            judged = state["judge"](state["maker"](inputs))
            accelerator.backward(sign * judged.mean() + judged.square().mean())
            state[f"{name}_optimizer"].step()
            state["maker_optimizer"].zero_grad()
            state["judge_optimizer"].zero_grad()
        state["maker_ema"].update_parameters(state["maker"])


def test_two_models_and_two_optimizers_are_one_checkpoint(tmp_path, accelerator):
    first = build_two(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, first)
    train_two(accelerator, first, 4)
    saver.save(4, {}, {})
    _, tensors = read_checkpoint(tmp_path / "checkpoints" / "step_00000004")
    assert set(tensors) == {f"{name}.safetensors" for name in (*first, "processes")}
    second = build_two(1, accelerator)
    assert checkpoints(accelerator, tmp_path, second).load()[0] == 4
    assert second["maker_ema"].n_averaged == 4
    for state in (first, second):
        train_two(accelerator, state, 3)
    assert_equal(first, second)


def as_text(states):
    return json.dumps(states, default=lambda tensor: tensor.tolist(), sort_keys=True)


def test_killed_between_any_two_writes_no_part_is_newer_than_another(tmp_path, accelerator, monkeypatch):
    state = build_two(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state, keep=1)  # the old one goes last
    expected = {}
    for step in (1, 2):
        train_two(accelerator, state, step)
        expected[step] = {name: part.state_dict() for name, part in state.items()}
        expected[step] = as_text(expected[step])
        if step == 1:
            saver.save(1, {}, {})
    files = len(state) + 2  # processes.safetensors and manifest.json
    calls = ["write_tensors"] * (files - 1) + ["write_synced"] + ["fsync_folder"] * 2
    for allowed in range(len(calls) + 1):
        left = [allowed]

        def die_after(name, left=left):
            function = getattr(checkpoint, name)

            def count(*words):
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                return function(*words)

            return count

        with monkeypatch.context() as patch:
            for name in set(calls):
                patch.setattr(checkpoint, name, die_after(name))
            if allowed < len(calls):
                with pytest.raises(KeyboardInterrupt):
                    saver.save(2, {}, {})
            else:
                saver.save(2, {}, {})
        loaded = build_two(7, accelerator)
        step = checkpoints(accelerator, tmp_path, loaded).load()[0]
        # The folder has its name after the last file and the first flush of a folder.
        assert step == (2 if allowed > files else 1)
        found = {name: part.state_dict() for name, part in loaded.items()}
        assert as_text(found) == expected[step]
        assert not list((tmp_path / "checkpoints").glob(".part_*"))


def test_the_manifest_is_written_last(tmp_path, accelerator, monkeypatch):
    """A file that is not whole then has no name in it, whatever the disk does with the folder."""
    written = []

    def recording(write):
        return lambda path, content: (written.append(path.name), write(path, content))[1]

    for name in ("write_tensors", "write_synced"):
        monkeypatch.setattr(checkpoint, name, recording(getattr(checkpoint, name)))
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    saver.save(1, {}, {}, lambda: written.append("what extra speaks of"))
    assert sorted(written[:-2]) == ["model.safetensors", "optimizer.safetensors", PROCESSES]
    assert written[-2:] == ["what extra speaks of", "manifest.json"]


class SlowDisk:
    """`write_tensors` that waits before each file until `end` is set."""

    def __init__(self, monkeypatch):
        self.began, self.end = threading.Event(), threading.Event()
        self.write = checkpoint.write_tensors
        monkeypatch.setattr(checkpoint, "write_tensors", self)

    def __call__(self, path, tensors):
        self.began.set()
        assert self.end.wait(60)
        return self.write(path, tensors)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, accelerator, monkeypatch):
    disk = SlowDisk(monkeypatch)
    state, expected = build(0, accelerator), build(0, accelerator)
    saver = Checkpoints(accelerator, tmp_path / "checkpoints", state, {})
    train(accelerator, state, 3)
    train(accelerator, expected, 3)
    metrics = {"loss": torch.ones(2)}
    before = set(threading.enumerate())
    saver.save(3, metrics, {})
    assert disk.began.wait(60)
    metrics["loss"].zero_()
    train(accelerator, state, 5)  # changes every tensor that is being written
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert not saver.failed()
    (writer,) = set(threading.enumerate()) - before
    disk.end.set()
    saver.wait()
    writer.join(20)  # nothing is left to wait for: a process may go on to another run
    assert not writer.is_alive()
    loaded = build(1, accelerator)
    step, _, loaded_metrics = checkpoints(accelerator, tmp_path, loaded).load()
    assert step == 3
    assert loaded_metrics["loss"].tolist() == [1, 1]
    assert_equal(loaded, expected)


def test_the_next_save_waits_for_the_one_before_and_takes_its_memory(tmp_path, accelerator, monkeypatch):
    disk = SlowDisk(monkeypatch)
    state = build(0, accelerator)
    saver = Checkpoints(accelerator, tmp_path / "checkpoints", state, {})
    train(accelerator, state, 1)
    saver.save(1, {}, {})
    addresses = [tensor.data_ptr() for copies in saver.copies.values() for tensor in copies.values()]
    threading.Timer(0.3, disk.end.set).start()
    train(accelerator, state, 1)
    saver.save(2, {}, {})
    assert (tmp_path / "checkpoints" / "step_00000001").exists()
    saver.wait()
    assert addresses == [tensor.data_ptr() for copies in saver.copies.values() for tensor in copies.values()]
    for step in (1, 2):
        read_checkpoint(tmp_path / "checkpoints" / f"step_{step:08d}")


def test_a_failure_while_training_goes_on_is_told_when_it_is_asked_for(tmp_path, accelerator, monkeypatch, capsys):
    def full(path, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    state = build(0, accelerator)
    saver = Checkpoints(accelerator, tmp_path / "checkpoints", state, {})
    train(accelerator, state, 1)
    saver.save(1, {}, {})
    saver.wait()
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    saver.save(2, {}, {})
    while not saver.failed():
        time.sleep(0.01)
    sentence = "the checkpoint of step 2 cannot be written"
    assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        saver.save(3, {}, {})
    assert sentence not in capsys.readouterr().err  # not a second time
    assert saver.complete_steps() == [1]
    assert not list((tmp_path / "checkpoints").glob(".part_*"))


def test_no_file_of_an_older_checkpoint_is_in_a_newer_one(tmp_path, accelerator):
    queue = Queue({"items": torch.ones(2)})
    saver = checkpoints(accelerator, tmp_path, {"queue": queue})
    saver.save(1, {}, {})
    queue.state = {"items": None}
    saver.save(2, {}, {})
    again = Queue({})
    assert checkpoints(accelerator, tmp_path, {"queue": again}).load()[0] == 2
    assert again.state == {"items": None}
    assert not (tmp_path / "checkpoints" / "step_00000002" / "queue.safetensors").exists()


def test_a_model_file_takes_the_place_of_what_a_kill_left(tmp_path, accelerator):
    model = nn.Linear(2, 2)
    (tmp_path / ".part_model.safetensors").mkdir()
    (tmp_path / ".part_model.safetensors" / ".tmpAbCdEf").write_text("half")
    tmp_path.chmod(0o777)
    before = os.umask(0o022)
    try:
        save_model(accelerator, model, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_tensors_are_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def record(descriptor):
        flushed.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    path = tmp_path / "a.safetensors"
    tensors = {"x": torch.arange(6).view(2, 3), "y": torch.ones(2, dtype=torch.bfloat16)}
    digest = checkpoint.write_tensors(path, tensors)
    assert str(path) in flushed
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_tensors_that_cannot_be_written_are_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing/a"):
        checkpoint.write_tensors(tmp_path / "missing" / "a", {"x": torch.ones(1)})


def test_those_who_may_read_the_folder_may_read_the_files(tmp_path, accelerator):
    before = os.umask(0o027)
    try:
        checkpoints(accelerator, tmp_path, build(0, accelerator)).save(1, {}, {})
    finally:
        os.umask(before)
    files = list((tmp_path / "checkpoints" / "step_00000001").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_tied_weights_are_saved_for_both_names_and_stay_tied(tmp_path, accelerator):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.last.weight = self.first.weight

    def built(seed):
        torch.manual_seed(seed)
        model = Tied()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    first, second = built(0), built(1)
    first["model"].last(first["model"].first(torch.tensor([1]))).sum().backward()
    first["optimizer"].step()
    checkpoints(accelerator, tmp_path, first).save(1, {}, {})
    checkpoints(accelerator, tmp_path, second).load()
    assert_equal(first, second)
    assert second["model"].first.weight is second["model"].last.weight
    save_model(accelerator, first["model"], tmp_path / "model.safetensors")
    assert len(safetensors.torch.load_file(tmp_path / "model.safetensors")) == 2


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
    checkpoints(accelerator, tmp_path, {"queue": Queue(state)}).save(1, {}, {})
    queue = Queue({})
    assert checkpoints(accelerator, tmp_path, {"queue": queue}).load()[0] == 1
    assert str(queue.state) == str(state)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (object(), "x, a object, cannot be saved: it has no state_dict and load_state_dict"),
        (Queue({"a": {"b": {1, 2}}}), "x, a Queue, cannot be saved: a/b is a set"),
        (Queue({"a": {(1, 2): 3}}), "x, a Queue, cannot be saved: a is a dict with the key (1, 2)"),
        (Queue({1: 2, "1": 3}), "x, a Queue, cannot be saved: its state is a dict with the key"),
        (Queue({True: 2}), "x, a Queue, cannot be saved: its state is a dict with the key True"),
    ],
)
def test_what_cannot_be_saved_is_named_at_the_start(tmp_path, accelerator, capsys, part, sentence):
    with pytest.raises(SystemExit):
        checkpoints(accelerator, tmp_path, {"x": part})
    assert sentence in capsys.readouterr().err


def test_the_name_of_the_checkpoints_own_file_is_taken(tmp_path, accelerator, capsys):
    with pytest.raises(SystemExit):
        checkpoints(accelerator, tmp_path, {"processes": nn.Linear(1, 1)})
    assert "the name processes is taken" in capsys.readouterr().err


# --- what does not fit ------------------------------------------------------------------------


def refused(accelerator, folder, state, fixed=None):
    """Load; returns whether it was refused, in one sentence and with the folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(SystemExit) as stopped:
        checkpoints(accelerator, folder, state, fixed).load()
    assert stopped.value.code == 2
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def saved(accelerator, folder, state, fixed=None):
    saver = checkpoints(accelerator, folder, state, fixed)
    train(accelerator, state, 2)
    saver.save(2, {}, {})


def test_what_the_script_declared_must_match(tmp_path, accelerator, capsys):
    saved(accelerator, tmp_path, build(0, accelerator), {"data": "x", "lr": 0.1, "sizes": (1, 2)})
    same = {"data": "x", "lr": 0.1, "sizes": [1, 2]}
    assert checkpoints(accelerator, tmp_path, build(0, accelerator), same).load()[0] == 2
    fixed = {"data": "y", "lr": 0.2, "sizes": (1, 2), "new": None}
    refused(accelerator, tmp_path, build(0, accelerator), fixed)
    error = capsys.readouterr().err
    assert "data was 'x' and is 'y'; lr was 0.1 and is 0.2" in error
    assert len(error.splitlines()) == 1


CHANGED = {
    "class of the schedule": (
        {"scheduler": SCHEDULERS["restarts"]},
        "scheduler.class was 'OneCycleLR' and is 'CosineAnnealingWarmRestarts'",
    ),
    "a setting of the schedule": (
        {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, 60)},
        "scheduler.total_steps was 50 and is 60",
    ),
    "an inner setting of the schedule": (
        {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, 50, pct_start=0.5)},
        "scheduler._schedule_phases.0.end_step was 14.0 and is 24.0",
    ),
    "class of the optimizer": ({"optimizer": torch.optim.Adam}, "optimizer.class was 'AdamW' and is 'Adam'"),
    "a hyperparameter": ({"eps": 1e-6}, "optimizer.eps was 1e-08 and is 1e-06"),
    "lr": (
        {"scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, 50)},
        "optimizer.max_lr was 0.01 and is 0.02",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_optimizers_and_schedules_are_refused(tmp_path, accelerator, capsys, name):
    """Though the script did not declare anything."""
    saved(accelerator, tmp_path, build(0, accelerator))
    options, sentence = CHANGED[name]
    refused(accelerator, tmp_path, build(0, accelerator, **options))
    assert sentence in capsys.readouterr().err


def test_a_default_of_the_optimizer_is_compared(tmp_path, accelerator, capsys):
    def built(optimizer):
        model = nn.Linear(4, 2)
        return {"model": model, "optimizer": optimizer(model.parameters())}

    saved(accelerator, tmp_path, built(torch.optim.Adam))
    refused(accelerator, tmp_path, built(lambda p: torch.optim.Adam(p, lr=0.002)))
    assert "optimizer.lr was 0.001 and is 0.002" in capsys.readouterr().err


def test_how_a_step_is_computed_may_change(tmp_path, accelerator):
    saved(accelerator, tmp_path, build(0, accelerator))
    other = build(0, accelerator, fused=True)
    assert checkpoints(accelerator, tmp_path, other).load()[0] == 2
    assert other["optimizer"].param_groups[0]["fused"] is True


def test_another_precision_is_refused(tmp_path, accelerator, capsys, monkeypatch):
    saved(accelerator, tmp_path, build(0, accelerator))
    monkeypatch.setattr(type(accelerator), "mixed_precision", "bf16")
    refused(accelerator, tmp_path, build(0, accelerator))
    assert "precision was 'no' and is 'bf16'" in capsys.readouterr().err


MODELS = {
    "dtype": (
        lambda: nn.Linear(4, 2),
        lambda: nn.Linear(4, 2).bfloat16(),
        "model.weight was bfloat16 (2, 4) and is float32 (2, 4)",
    ),
    "shape": (
        lambda: nn.Linear(4, 2),
        lambda: nn.Linear(4, 3),
        "model.weight was float32 (3, 4) and is float32 (2, 4)",
    ),
    "parameter added": (
        lambda: nn.Linear(4, 2),
        lambda: nn.Linear(4, 2, bias=False),
        "model.bias was absent and is float32 (2,)",
    ),
    "parameter missing": (
        lambda: nn.Linear(4, 2, bias=False),
        lambda: nn.Linear(4, 2),
        "model.bias was float32 (2,) and is absent",
    ),
    "buffer added": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, affine=False)),
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Identity()),
        "model.1.running_mean was absent and is float32 (2,)",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_model_is_refused_by_what_differs(tmp_path, accelerator, capsys, name):
    build_now, build_then, sentence = MODELS[name]
    then, now = build_then(), build_now()
    checkpoints(accelerator, tmp_path, {"model": then}).save(1, {}, {})
    before = {key: tensor.clone() for key, tensor in now.state_dict().items()}
    refused(accelerator, tmp_path, {"model": now})
    assert sentence in capsys.readouterr().err
    assert all(torch.equal(before[key], tensor) for key, tensor in now.state_dict().items())


def test_other_parts_are_refused(tmp_path, accelerator, capsys):
    state = build(0, accelerator)
    saved(accelerator, tmp_path, state)
    refused(accelerator, tmp_path, {**state, "model_ema": AveragedModel(state["model"])})
    assert "the checkpoint has model, optimizer, scheduler, and the run model, model_ema, opt" in (
        capsys.readouterr().err
    )


def rewrite(path, change, change_last=lambda manifest: None):
    """Change a checkpoint with `change(manifest, tensors)`, under checksums that fit.

    change_last: for what decides which files are written.
    """
    manifest, tensors = read_checkpoint(path)
    change(manifest, tensors)
    manifest["sha256"] = {
        name: checkpoint.write_synced(path / name, safetensors.torch.save(content)) for name, content in tensors.items()
    }
    change_last(manifest)
    manifest["checksum"] = checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("shape", [(1,), (2, 4), (3, 5)])
def test_moments_of_a_wrong_shape_are_refused(tmp_path, accelerator, capsys, shape):
    """A fused step would run over the end of the memory."""
    saved(accelerator, tmp_path, build(0, accelerator))

    def shrink(manifest, tensors):
        tensors["optimizer.safetensors"]["0.weight/exp_avg"] = torch.zeros(shape)

    rewrite(tmp_path / "checkpoints" / "step_00000002", shrink)
    refused(accelerator, tmp_path, build(0, accelerator))
    sentence = f"optimizer's 0.weight/exp_avg has the shape {shape} for a parameter of (3, 4)"
    assert sentence in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_refused_and_stays(tmp_path, accelerator, capsys):
    saved(accelerator, tmp_path, build(0, accelerator))
    rewrite(tmp_path / "checkpoints" / "step_00000002", lambda manifest, tensors: manifest.update(format=1))
    refused(accelerator, tmp_path, build(0, accelerator))
    error = capsys.readouterr().err
    assert "was written by another version of this code (format 1, this one reads 2): end" in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_folder_that_was_moved_away_is_not_made_again(tmp_path, accelerator, capsys):
    run = tmp_path / "run"
    run.mkdir()
    saver = checkpoints(accelerator, run, build(0, accelerator))
    saver.save(1, {}, {})
    run.rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        saver.save(2, {}, {})
    said = capsys.readouterr().err
    assert "the checkpoint of step 2 cannot be written to" in said
    assert "the folder of the run was moved or removed" in said
    assert names(tmp_path / "moved") == ["step_00000001"]
    assert not run.exists()


def occupy_file(path):
    path.write_text("x")


def occupy_link(path):
    target = path.parent.parent / "elsewhere"
    target.mkdir()
    (target / "kept").write_text("x")
    path.symlink_to(target)


@pytest.mark.parametrize("occupy", [occupy_file, occupy_link])
def test_what_stands_where_an_old_checkpoint_did_is_removed(tmp_path, accelerator, occupy):
    """But not what a link leads to."""
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator), keep=1)
    for name in ("step_00000001", ".part_step_00000001", ".part_step_00000002"):
        path = tmp_path / "checkpoints" / name
        path.parent.mkdir(exist_ok=True)
        if name == "step_00000001":
            occupy(path)
        else:
            path.mkdir()
            (path / "x").write_text("x")
    saver.save(2, {}, {})
    assert names(tmp_path) == ["step_00000002"]
    assert occupy is occupy_file or (tmp_path / "elsewhere" / "kept").exists()


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, accelerator, capsys, monkeypatch):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator), keep=1)
    saver.save(1, {}, {})

    def refuse(path):
        if "step_00000001" in path.name:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(checkpoint, "remove", refuse)
    rename = Path.rename

    def kept(path, to):
        return None if path.name == "step_00000001" else rename(path, to)

    monkeypatch.setattr(Path, "rename", kept)
    for step in (2, 3):
        saver.save(step, {}, {})
    path = tmp_path / "checkpoints" / "step_00000001"
    warning = f"warning: {path} cannot be removed: Operation not permitted\n"
    assert capsys.readouterr().out == warning  # once


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(tmp_path, accelerator, monkeypatch):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator), keep=1)
    saver.save(1, {}, {})
    remove = checkpoint.remove

    def die(path):
        if path.is_dir():
            (path / "manifest.json").unlink()
            raise KeyboardInterrupt
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            saver.save(2, {}, {})
    assert saver.complete_steps() == [2]
    assert saver.load()[0] == 2
    assert names(tmp_path) == ["step_00000002"]


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path, accelerator, capsys):
    """Though the losses were: they were computed before the step."""
    state = build(0, accelerator)
    state["model"].register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    saver = checkpoints(accelerator, tmp_path, state)
    saver.save(1, {}, {})
    state["model"][2].bias.data[1] = torch.nan
    with pytest.raises(SystemExit):
        saver.save(2, {}, {})
    assert "error: model.2.bias is not finite after step 2, and no" in capsys.readouterr().err
    assert names(tmp_path) == ["step_00000001"]


def test_a_save_that_takes_as_long_as_the_launcher_waits_is_told_once(tmp_path, accelerator, capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0")
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    saver.save(1, {}, {})
    assert capsys.readouterr().out == ""  # `accelerate launch` of one process does not kill
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for step in (2, 3):
        saver.save(step, {}, {})
    said = capsys.readouterr().out
    assert said.startswith("warning: a checkpoint takes 0 s, and 0 s after a Ctrl-C or SIGTERM")
    assert said.endswith("start it with TORCH_ELASTIC_SHUTDOWN_TIMEOUT=4 in the environment\n")
    assert said.count("\n") == 1
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert launchers_patience_s() == 30


# --- what was damaged, or written by somebody else ---------------------------------------------


MANIFESTS = {
    **{f"without {name}": lambda manifest, name=name: manifest.pop(name) for name in ENTRIES},
    **{f"{name} of another type": lambda manifest, name=name: manifest.update({name: [1]}) for name in ENTRIES},
    "step is true": lambda manifest: manifest.update(step=True),
    "another step": lambda manifest: manifest.update(step=3),
    "no processes": lambda manifest: manifest.update(num_processes=0),
    "many processes": lambda manifest: manifest.update(num_processes=10**9),
    "metrics_bytes": lambda manifest: manifest["extra"].update(metrics_bytes="many"),
    "best": lambda manifest: manifest["extra"].update(best={"loss": "good"}),
    "best of three": lambda manifest: manifest["extra"].update(best={"loss": [1, 2, 3]}),
    "a file outside": lambda manifest: manifest["sha256"].update({"../../x.safetensors": "0"}),
    "an absolute file": lambda manifest: manifest["sha256"].update({"/x.safetensors": "0"}),
    "another file": lambda manifest: manifest["sha256"].update({"x": "0"}),
    "a digest that is none": lambda manifest: manifest["sha256"].update({PROCESSES: 5}),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_save_did_not_write_is_damage(tmp_path, accelerator, capsys, name):
    """Under a checksum that fits. The checkpoint before it is used."""
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    for step in (1, 2):
        saver.save(step, {}, {})
    path = tmp_path / "checkpoints" / "step_00000002"
    rewrite(path, lambda manifest, tensors: None, MANIFESTS[name])
    assert saver.load()[0] == 1
    said = capsys.readouterr().out
    assert said.startswith(f"warning: {path} is skipped: ")
    assert said.count("\n") == 1
    assert names(tmp_path) == ["damaged_step_00000002", "step_00000001"]


def test_a_manifest_nested_5000_deep_is_damage(tmp_path, accelerator, capsys):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    for step in (1, 2):
        saver.save(step, {}, {})
    path = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
    path.write_text("[" * 5000 + "]" * 5000)
    (tmp_path / "checkpoints" / "damaged_step_00000002").write_text("a file with that name")
    assert saver.load()[0] == 1
    assert "step_00000002 is skipped: manifest.json: maximum recursion" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", PROCESSES])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_that_is_no_regular_file_is_damage(tmp_path, accelerator, capsys, name, kind):
    """A pipe waits for a writer, and a device such as /dev/zero has no end."""
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    for step in (1, 2):
        saver.save(step, {}, {})
    path = tmp_path / "checkpoints" / "step_00000002" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")  # of the same kind, but harmless
    else:
        path.mkdir()
    assert saver.load()[0] == 1
    reason = "Is a directory" if kind == "folder" else "it is no regular file"
    assert f"is skipped: {name}: {reason}" in capsys.readouterr().out


def test_a_file_larger_than_the_memory_is_damage(tmp_path, accelerator, capsys):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    for step in (1, 2):
        saver.save(step, {}, {})
    os.truncate(tmp_path / "checkpoints" / "step_00000002" / "model.safetensors", 2**42)  # sparse
    assert saver.load()[0] == 1
    said = capsys.readouterr().out
    assert "model.safetensors: its 4,398,046,511,104 bytes do not fit into the memory" in said


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_what_cannot_be_read_for_the_moment_stays(tmp_path, accelerator, capsys, monkeypatch, number):
    state = build(0, accelerator)
    saver = checkpoints(accelerator, tmp_path, state)
    for step in (1, 2):
        saver.save(step, {}, {})
    read = checkpoint.read_regular

    def refuse(path, limit):
        if path.name == "model.safetensors":
            raise OSError(number, os.strerror(number), str(path))
        return read(path, limit)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_regular", refuse)
        refused(accelerator, tmp_path, state)
    said = capsys.readouterr().err
    assert f"model.safetensors cannot be read ({os.strerror(number)}): nothing was changed" in said
    assert saver.load()[0] == 2


def test_names_that_save_does_not_write_are_no_checkpoints(tmp_path, accelerator):
    saver = checkpoints(accelerator, tmp_path, build(0, accelerator))
    saver.save(25, {}, {})
    for name in ("step_26", "step_000000027", "step_\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert saver.complete_steps() == [25]
    assert saver.load()[0] == 25


STATES = {
    "an empty group": lambda manifest: manifest["state"]["optimizer"]["groups"].append({}),
    "a learning rate of text": lambda manifest: manifest["state"]["optimizer"]["groups"][0].update(lr="x"),
    "no groups": lambda manifest: manifest["state"]["optimizer"].pop("groups"),
    "a schedule of a list": lambda manifest: manifest["state"].update(scheduler={"list": []}),
    "a schedule without an entry": lambda manifest: manifest["state"]["scheduler"]["dict"].pop("last_epoch"),
    "a schedule with a method": lambda manifest: manifest["state"]["scheduler"]["dict"].update(step=5),
}


@pytest.mark.parametrize("name", STATES)
def test_state_that_cannot_be_loaded_is_one_sentence(tmp_path, accelerator, capsys, name):
    saved(accelerator, tmp_path, build(0, accelerator))
    path = tmp_path / "checkpoints" / "step_00000002"
    rewrite(path, lambda manifest, tensors: None, STATES[name])
    refused(accelerator, tmp_path, build(0, accelerator))
    said = capsys.readouterr().err
    assert f" in {path} cannot be loaded (" in said
    assert len(said.splitlines()) == 1


def test_a_step_count_of_another_shape_is_refused(tmp_path, accelerator, capsys):
    """A fused step reads it as one number."""
    saved(accelerator, tmp_path, build(0, accelerator, fused=True))

    def empty(manifest, tensors):
        tensors["optimizer.safetensors"]["0.weight/step"] = torch.zeros(0)

    rewrite(tmp_path / "checkpoints" / "step_00000002", empty)
    refused(accelerator, tmp_path, build(0, accelerator, fused=True))
    assert "optimizer's 0.weight/step has the shape (0,) for a parameter" in capsys.readouterr().err


def test_another_number_of_processes_takes_all_metrics(tmp_path):
    accelerator = SimpleNamespace(num_processes=3, process_index=0, scaler=None, mixed_precision="no")
    saver = checkpoints(accelerator, tmp_path, {})
    tensors = {
        "0/indices": torch.tensor([1, 2]),
        "0/random_cpu": torch.zeros(1),
        "1/indices": torch.tensor([3]),
        "1/random_cpu": torch.zeros(1),
    }
    assert saver._own_part({"num_processes": 2}, tensors)["indices"].tolist() == [1, 2, 3]
    accelerator.process_index = 1
    (empty,) = saver._own_part({"num_processes": 2}, tensors).items()
    assert (empty[0], len(empty[1])) == ("indices", 0)
