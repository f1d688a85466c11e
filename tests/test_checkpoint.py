"""Checkpoints of models that are wrapped or sharded, and of what else a step needs."""

import argparse
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from conftest import ROOT, free_port
from torch import nn

from utils.checkpoint import Checkpoints, read_checkpoint, save_model


def arguments(folder, **changes):
    given = {"output_dir": str(folder), "keep_checkpoints": 2, "seed": 0, "lr": 0.1, "log_every": 5, **changes}
    return argparse.Namespace(**given)


def build(seed, accelerator):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 50)
    return accelerator.prepare(model, optimizer, scheduler)


def train(accelerator, model, optimizer, scheduler, steps):
    for step in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(inputs).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_everything_that_a_step_needs_comes_back(tmp_path):
    """Buffers of BatchNorm, moments, the schedule with its momentum, a scaler, statistics, and torch's generator."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    prepared = build(0, accelerator)
    train(accelerator, *prepared, 7)
    checkpoints = Checkpoints(accelerator, arguments(tmp_path), {"data": "x"})
    checkpoints.save(7, *prepared, {"losses": torch.tensor([1.5])}, {"best_accuracy": 0.75})
    expected_random = torch.rand(3)
    train(accelerator, *prepared, 5)

    other = build(1, accelerator)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    step, extra, stats = Checkpoints(accelerator, arguments(tmp_path), {"data": "x"}).load(*other)
    assert (step, extra) == (7, {"best_accuracy": 0.75})
    assert stats["losses"].tolist() == [1.5]
    assert accelerator.scaler.get_scale() == 1024.0
    assert torch.equal(torch.rand(3), expected_random)
    train(accelerator, *other, 5)
    for name, tensor in prepared[0].state_dict().items():
        assert torch.equal(other[0].state_dict()[name], tensor), name
    assert other[1].param_groups[0]["lr"] == prepared[1].param_groups[0]["lr"]
    assert tuple(other[1].param_groups[0]["betas"]) == tuple(prepared[1].param_groups[0]["betas"])


def test_moments_come_back_in_the_layout_of_their_weights(tmp_path):
    """A fused step reads the memory of both side by side: with other strides, a weight gets the momentum of another."""
    accelerator = Accelerator(cpu=True)

    def build_convolution(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        return accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))

    def step(model, optimizer, _):
        accelerator.backward(model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    first, other = build_convolution(0), build_convolution(1)
    step(*first)
    Checkpoints(accelerator, arguments(tmp_path), {}).save(1, *first, {}, {})
    Checkpoints(accelerator, arguments(tmp_path), {}).load(*other)
    for parameter, state in other[1].optimizer.state.items():
        assert state["momentum_buffer"].stride() == parameter.stride()
    step(*first)
    step(*other)
    assert torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_names_are_those_of_the_bare_model(tmp_path, wrap):
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = build(0, accelerator)
    train(accelerator, model, optimizer, scheduler, 2)
    wrapped = wrap(model)
    save_model(accelerator, wrapped, tmp_path / "model.safetensors")
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).load_state_dict(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True
    )
    Checkpoints(accelerator, arguments(tmp_path), {}).save(2, wrapped, optimizer, scheduler, {}, {})
    _, tensors = read_checkpoint(tmp_path / "checkpoints" / "step_00000002")
    assert set(tensors["model.safetensors"]) == set(model.state_dict())
    assert "0.weight/exp_avg" in tensors["optimizer.safetensors"]
    other = build(1, accelerator)
    assert Checkpoints(accelerator, arguments(tmp_path), {}).load(*other)[0] == 2
    assert torch.equal(other[0].state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_the_newest_is_the_largest_number_and_not_the_last_name(tmp_path):
    accelerator = Accelerator(cpu=True)
    prepared = build(0, accelerator)
    checkpoints = Checkpoints(accelerator, arguments(tmp_path, keep_checkpoints=0), {})
    for step in (99_999_999, 100_000_000, 5):
        checkpoints.save(step, *prepared, {}, {})
    (tmp_path / "checkpoints" / "step_notes").mkdir()
    assert checkpoints.complete_steps() == [100_000_000, 99_999_999, 5]
    assert checkpoints.load(*prepared)[0] == 100_000_000


def test_harmless_arguments_may_change_and_others_not(tmp_path, capsys):
    accelerator = Accelerator(cpu=True)
    prepared = build(0, accelerator)
    Checkpoints(accelerator, arguments(tmp_path), {"data": "x"}).save(1, *prepared, {}, {})
    changed = arguments(tmp_path, log_every=7, keep_checkpoints=9)
    assert Checkpoints(accelerator, changed, {"data": "x"}).load(*prepared)[0] == 1
    with pytest.raises(SystemExit):
        Checkpoints(accelerator, arguments(tmp_path, lr=0.2), {"data": "y"}).load(*prepared)
    error = capsys.readouterr().err
    assert "data was 'x' and is 'y'" in error
    assert "lr was 0.1 and is 0.2" in error


def test_a_kill_between_two_files_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Stopped before each write in turn: the folder has its name only when all is in it."""
    from utils import checkpoint

    accelerator = Accelerator(cpu=True)
    prepared = build(0, accelerator)
    checkpoints = Checkpoints(accelerator, arguments(tmp_path), {})
    checkpoints.save(1, *prepared, {}, {})
    write = checkpoint.write_synced
    for allowed in range(4):
        left = [allowed]

        def die(*words, left=left):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return write(*words)

        monkeypatch.setattr(checkpoint, "write_synced", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, *prepared, {}, {})
        assert checkpoints.complete_steps() == [1]
        assert checkpoints.load(*prepared)[0] == 1


SHARDED = """
import argparse, sys
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[1])
from utils.checkpoint import Checkpoints, save_model

accelerator = Accelerator(cpu=True)
mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,))

def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20)
    return model, SimpleNamespace(optimizer=optimizer), SimpleNamespace(scheduler=scheduler)

def train(model, optimizer, scheduler, steps):
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 5)).square().sum().backward()
        optimizer.optimizer.step(); scheduler.scheduler.step(); optimizer.optimizer.zero_grad()

args = argparse.Namespace(output_dir=sys.argv[2], keep_checkpoints=2)
first = build(0)
train(*first, 4)
Checkpoints(accelerator, args, {}).save(4, *first, {}, {})
train(*first, 3)
second = build(7)
assert Checkpoints(accelerator, args, {}).load(*second)[0] == 4
train(*second, 3)
for (name, one), two in zip(first[0].named_parameters(), second[0].parameters()):
    assert torch.equal(one.full_tensor(), two.full_tensor()), name
save_model(accelerator, second[0], __import__("pathlib").Path(sys.argv[2]) / "model.safetensors")
accelerator.end_training()
"""


@pytest.mark.slow
def test_a_model_sharded_by_fsdp2_is_saved_whole_and_goes_on(tmp_path):
    """fully_shard over gloo on the CPU: Accelerate shards on GPUs only, torch's state-dict functions do not mind."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(tmp_path / "sharded.py"), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)).load_state_dict(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True
    )
    manifest = json.loads((tmp_path / "checkpoints" / "step_00000004" / "manifest.json").read_text())
    assert manifest["optimizer"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_another_number_of_processes_takes_all_statistics(tmp_path):
    checkpoints = Checkpoints(SimpleNamespace(num_processes=3, process_index=0), arguments(tmp_path), {})
    tensors = {"0/losses": torch.tensor([1.0, 2.0]), "1/losses": torch.tensor([3.0]), "1/random_cpu": torch.zeros(1)}
    assert checkpoints._own_part({"num_processes": 2}, tensors)["losses"].tolist() == [1.0, 2.0, 3.0]
    checkpoints.accelerator.process_index = 1
    assert checkpoints._own_part({"num_processes": 2}, tensors) == {}
