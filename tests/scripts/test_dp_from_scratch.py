"""DataParallel by hand ends with plain autograd's weights; what it counts is what there is."""

import contextlib
import re
import sys
import threading

import pytest
import run_reader
import torch
import virtual_gpus
from accelerate import Accelerator

from scripts.from_scratch import data_parallel
from scripts.from_scratch.data_parallel import (
    CpuDevices,
    Gpus,
    Memory,
    Painter,
    data_parallel_step,
    edges,
)

PIXELS = 49
PHASES = [
    "scatter",
    "replicate",
    "forward",
    "gather",
    "loss",
    "loss backward",
    "scatter grads",
    "backward",
    "reduce",
    "step",
]


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (31, 1, 7, 7), dtype=torch.uint8, generator=generator) for _ in range(3)]


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", "--num_devices", "3"])
    return data_parallel.parse_args()


def difference(args, batches, devices, loss_inside):
    """The largest difference of a weight to plain autograd's, after three steps."""
    reference, _ = data_parallel.train_plain(args, batches)
    weights, _ = data_parallel.train(args, batches, devices, loss_inside)
    assert len(weights) == len(reference) > 1000
    return (weights - reference).abs().max().item()


@pytest.mark.parametrize("loss_inside", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 40])  # 31 samples on 40 devices: 9 have none
def test_the_weights_are_those_of_plain_autograd(args, batches, count, loss_inside):
    args.num_devices = count
    for options in ({}, {"counts_memory": True}, {"one_call": True}):
        assert difference(args, batches, CpuDevices(count, **options), loss_inside) < 1e-12


def one_step(devices, images, loss_inside):
    torch.manual_seed(0)
    model = Painter(PIXELS).double()
    devices.place(model.parameters(), "model")
    devices.place([images], "batch")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    gradients = data_parallel_step(model, optimizer, images, devices, loss_inside)
    return model, optimizer, gradients


@pytest.mark.parametrize("loss_inside", [False, True])
def test_moved_bytes_are_those_of_the_tensors(batches, loss_inside):
    devices, images = CpuDevices(3), batches[0]
    model, _, _ = one_step(devices, images, loss_inside)
    weights = sum(weight.nbytes for weight in model.parameters())
    a_sample = 8 if loss_inside else 8 * data_parallel.LEVELS * PIXELS
    expected = {}
    for device, samples in enumerate((11 + 9, 11, 9)):  # the first one sends to both
        for phase in ("gather", "scatter grads"):
            expected[phase, device] = samples * a_sample
        for phase in ("replicate", "reduce"):
            expected[phase, device] = weights * (2 if device == 0 else 1)
        expected["scatter", device] = samples * PIXELS
    assert dict(devices.moved) == expected
    assert list(dict.fromkeys(span[1] for span in devices.spans)) == PHASES


@pytest.mark.parametrize("loss_inside", [False, True])
def test_torchs_own_functions_make_the_same_step(args, batches, monkeypatch, loss_inside):
    """The path for GPUs, on virtual ones: only the times and the memory are those of no GPU."""
    virtual_gpus.install(monkeypatch.setattr, 3)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert difference(args, batches, Gpus(3), loss_inside) < 1e-12
    ours, theirs = Gpus(3), CpuDevices(3)
    for devices in (ours, theirs):
        one_step(devices, batches[0], loss_inside)
    assert ours.moved == theirs.moved
    assert list(dict.fromkeys(span[1] for span in ours.spans)) == PHASES
    found = data_parallel.measure_answers(args, batches, Gpus)
    assert found["weights_on_first_device"] == 1
    assert found["replica_to_model"] == 0
    assert found["parts"][30, 3] == [10, 10, 10]


def test_memory_counts_tensors_until_they_are_freed_and_no_views():
    memory, outside = Memory(), torch.ones(1000)
    with memory:
        doubled = outside * 2
        view = doubled.view(10, 100).t()
        doubled.add_(1)
        outside.view(10, 100)
    assert sum(memory.held.values()) == memory.highest == 4000
    del doubled
    assert sum(memory.held.values()) == 4000  # the view needs it
    del view
    assert sum(memory.held.values()) == 0
    with memory:
        weight = torch.ones(1000, requires_grad=True)
        loss = (weight.exp() * 2).sum()
    assert sum(memory.held.values()) == 2 * 4000 + 4  # autograd keeps the exponential
    loss.backward()
    del loss
    assert sum(memory.held.values()) == 4000


@pytest.mark.parametrize("loss_inside", [False, True])
def test_after_a_step_the_first_device_holds_the_model_and_the_others_nothing(batches, loss_inside):
    devices = CpuDevices(3, counts_memory=True)
    model, _, gradients = one_step(devices, batches[0], loss_inside)
    del gradients
    weights = sum(weight.nbytes for weight in model.parameters())
    held = [dict(+memory.held) for memory in devices.memories]
    assert held == [{"model": weights, "batch": batches[0].nbytes, "step": weights}, {}, {}]


def test_gathered_logits_fill_the_first_device_and_losses_inside_do_not(batches):
    images, peaks = torch.cat(batches * 4), {}
    for loss_inside in (False, True):
        devices = CpuDevices(3, counts_memory=True)
        one_step(devices, images, loss_inside)
        peaks[loss_inside] = [memory.highest for memory in devices.memories]
        gathered = devices.memories[0].held_at_highest["gather"]
        a_sample = 8 if loss_inside else 8 * data_parallel.LEVELS * PIXELS
        assert gathered == len(images) * a_sample
    assert peaks[False][0] > 1.5 * peaks[True][0]
    assert peaks[False][0] > 3 * peaks[False][1]


def test_each_replica_has_a_thread_and_autograd_alone_has_one(batches):
    found = {}
    for one_call in (False, True):
        devices = CpuDevices(3, one_call=one_call)
        _, _, found[one_call] = one_step(devices, batches[0], False)
        here = threading.get_ident() in devices.backward_threads
        assert (len(devices.backward_threads), here) == ((1, True) if one_call else (3, False))
    torch.testing.assert_close(found[False], found[True], rtol=1e-12, atol=1e-16)


def test_replicas_of_the_first_device_share_its_memory_and_others_do_not():
    model, devices = Painter(PIXELS), CpuDevices(2)
    with devices.phase("replicate"):
        _, (first, second) = devices.replicate(model, 2)
    for weight, ours, copied in zip(model.parameters(), first, second, strict=True):
        assert ours.data_ptr() == weight.data_ptr() != copied.data_ptr()
        assert torch.equal(copied, weight)
    assert len(edges(first)) == len(first)


def test_several_processes_are_refused_in_one_sentence(args, capsys):
    accelerator = Accelerator(cpu=True)
    accelerator.state.num_processes = 2
    with pytest.raises(SystemExit) as stopped:
        data_parallel.choose_devices(args, accelerator)
    assert stopped.value.code == 2
    assert "use cpu.yaml or dp.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_prints_answers_and_draws(launcher, small_mnist):
    flags = ["--dataset", small_mnist, "--num_steps", 3, "--output_dir", "run"]
    printed = launcher("cpu", *flags, script="from_scratch/data_parallel").stdout
    run = launcher.folder / "run"
    record = run_reader.record(run)
    for way in ("gathered", "inside"):
        assert record["results"][way]["difference_to_plain"] < 1e-12
        assert list(record["results"][way]["phases"]) == PHASES
    answers = record["answers"]
    assert answers["parts"] == {"30 on 1": [30], "30 on 2": [15, 15], "30 on 3": [10, 10, 10], "4 on 3": [2, 2]}
    assert answers["backward_threads"] == 3
    assert answers["backward_difference"] == 0
    assert answers["weights_on_first_device"] == 1
    assert answers["replica_to_model"] == 0
    assert answers["gradients_of_replicas"] > 0.01
    assert answers["apart"] > 1e-4
    assert len(re.findall(r"\? (Yes|No)\.", printed)) == 3
    for picture in ("phases", "memory"):
        assert (run / f"{picture}.png").stat().st_size > 10_000
    assert "warning" not in printed
