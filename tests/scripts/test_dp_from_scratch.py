"""DataParallel by hand ends with plain autograd's weights, and counts the bytes that are moved and held."""

import contextlib
import sys

import pytest
import run_reader
import torch
import virtual_gpus

from scripts.from_scratch import data_parallel
from scripts.from_scratch.data_parallel import CpuDevices, Gpus, Painter, data_parallel_step

PIXELS = 49
FORWARD = ["scatter", "replicate", "forward", "gather", "loss"]
PHASES = [*FORWARD, "loss backward", "scatter grads", "backward", "reduce", "step"]


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (31, 1, 7, 7), dtype=torch.uint8, generator=generator) for _ in range(3)]


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", "--num_devices", "3"])
    return data_parallel.parse_args()


@pytest.fixture
def gpus(monkeypatch):
    """The class for GPUs, on three virtual ones."""
    virtual_gpus.install(monkeypatch.setattr, 3)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return Gpus


def difference_to_plain(args, batches, devices, loss_inside):
    """The largest difference between a weight and plain autograd's, after three steps."""
    reference, _ = data_parallel.train_plain(args, batches)
    weights, _ = data_parallel.train(args, batches, devices, loss_inside)
    assert len(weights) == len(reference) > 1000
    return (weights - reference).abs().max().item()


def one_step(devices, images, loss_inside):
    torch.manual_seed(0)
    model = Painter(PIXELS).double()
    devices.add_to_first([*model.parameters(), images])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data_parallel_step(model, optimizer, images, devices, loss_inside)
    return model, optimizer


def num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("loss_inside", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 40])  # 31 samples on 40 devices: 9 have none
def test_the_weights_equal_plain_autograd(args, batches, count, loss_inside):
    for counts_memory in (False, True):
        assert difference_to_plain(args, batches, CpuDevices(count, counts_memory), loss_inside) < 1e-12


@pytest.mark.parametrize("loss_inside", [False, True])
def test_pytorchs_own_functions_make_the_same_step_and_move_as_much(args, batches, gpus, loss_inside):
    assert difference_to_plain(args, batches, gpus(3), loss_inside) < 1e-12
    by_pytorch, by_hand = gpus(3), CpuDevices(3)
    for devices in (by_pytorch, by_hand):
        one_step(devices, batches[0], loss_inside)
    assert by_pytorch.moved == by_hand.moved
    assert list(dict.fromkeys(phase for phase, *_ in by_pytorch.spans)) == PHASES


@pytest.mark.parametrize("loss_inside", [False, True])
def test_the_bytes_of_all_moved_tensors_are_counted(batches, loss_inside):
    devices = CpuDevices(3)
    model, _ = one_step(devices, batches[0], loss_inside)
    weights = num_bytes(model.parameters())
    per_sample = 8 if loss_inside else 8 * data_parallel.LEVELS * PIXELS
    expected = {}
    for device, samples in enumerate((11 + 9, 11, 9)):  # the first one sends to both
        for phase in ("gather", "scatter grads"):
            expected[phase, device] = samples * per_sample
        for phase in ("replicate", "reduce"):
            expected[phase, device] = weights * (2 if device == 0 else 1)
        expected["scatter", device] = samples * PIXELS
    assert dict(devices.moved) == expected


@pytest.mark.slow
def test_a_run_records_each_way(launcher, small_mnist):
    flags = ["--dataset", small_mnist, "--num_steps", 3, "--output_dir", "run"]
    assert "warning" not in launcher("cpu", *flags, script="from_scratch/data_parallel").stdout
    results = run_reader.record(launcher.folder / "run")["results"]
    assert list(results) == ["plain", "gathered", "inside"]
    for way in ("gathered", "inside"):
        assert results[way]["difference_to_plain"] < 1e-12
        assert list(results[way]["phases"]) == PHASES
