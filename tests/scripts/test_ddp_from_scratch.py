"""Data parallelism by hand ends with DDP's weights, and DDP with those of one process."""

import copy
import sys
from argparse import Namespace

import pytest
import run_reader
import torch
import torch.distributed as dist
from conftest import ROOT

from scripts.from_scratch import ddp

FLAGS = ["--num_epochs", "2", "--dtype", "float64"]
SYNCHRONOUS = ["ddp", "one_by_one", "reduce_broadcast", "flat_copy", "bucketed", "ring"]


def results(folder):
    return run_reader.record(folder)["results"]


def run_here(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["ddp.py", *map(str, flags)])
    try:
        ddp.main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
def test_the_weights_are_those_of_ddp(launcher, small_mnist, tmp_path, monkeypatch):
    """The last step of an epoch has 3 of 1003 images: one of the four processes gets none."""
    flags = ["--dataset", str(small_mnist), *FLAGS, "--batch_size", "500"]
    options = {
        "script": ROOT / "tests" / "programs" / "ddp_probe",
        "launch_flags": ("--num_processes", 4),
        "timeout": 150,
    }
    printed = launcher("cpu_ddp", *flags, **options).stdout
    assert "<ring> equal" in printed

    everything = results(tmp_path / "all")
    assert list(everything) == [*SYNCHRONOUS, "local_sgd", "stale"]
    for name in SYNCHRONOUS:
        assert everything[name]["difference_to_ddp"] < 1e-12, name
    for name in ("local_sgd", "stale"):
        assert everything[name]["difference_to_ddp"] > 1e-3, name
    assert results(tmp_path / "synchronous")["local_sgd"]["difference_to_ddp"] < 1e-12
    assert results(tmp_path / "in time")["stale"]["difference_to_ddp"] < 1e-12
    assert results(tmp_path / "later than the end")["stale"]["difference_to_ddp"] > 1e-3
    # 6 steps, 2 buckets; DDP itself calls another all-reduce
    assert "<sent during backward> 12\n" in printed

    # And DDP's are those of one process, smaller last step and all.
    run_here(monkeypatch, "--output_dir", tmp_path / "one", *flags)
    one = results(tmp_path / "one")
    for name in [*SYNCHRONOUS, "local_sgd"]:
        assert one[name]["difference_to_ddp"] < 1e-12, name
    assert one["ddp"]["samples"] == 203
    (_, expected), *_ = run_reader.record(tmp_path / "one")["passed_on"]
    for _, gradient in run_reader.record(tmp_path / "all")["passed_on"]:
        assert gradient == pytest.approx(expected, rel=1e-12)  # DDP's mean over the whole batch
    for name in SYNCHRONOUS:
        assert everything[name]["loss"] == pytest.approx(one["ddp"]["loss"], rel=1e-12)
        assert everything[name]["accuracy"] == one["ddp"]["accuracy"]


def test_stale_gradients_are_late_and_none_is_lost(monkeypatch):
    """Gradients that do not depend on the weights end with the same weights if they come late."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight, seen = torch.nn.Parameter(torch.zeros(1)), []

        def backward(model, batch):
            seen.append(weight.item())
            gradient = 0 if weight.grad is None else weight.grad
            weight.grad = gradient + torch.tensor([float(batch)])

        class Model:
            def parameters(self):
                return [weight]

        monkeypatch.setattr(ddp, "backward", backward)
        args = type("Args", (), {"delay": 2})
        ddp.stale(Model(), torch.optim.SGD([weight], 1.0), [1, 10, 100, 1000], args)
        # The fourth gradient is taken with weights that only the first one has changed.
        assert seen == [0, 0, 0, -1]
        assert weight.item() == -1111
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_end_with_a_table(launcher, small_mnist):
    flags = ["--dataset", small_mnist, *FLAGS, "--batch_size", 500, "--output_dir", "run"]
    table = launcher("cpu_ddp", *flags, script="from_scratch/ddp").stdout.splitlines()
    start = next(i for i, line in enumerate(table) if line.startswith("algorithm"))
    table = table[start : start + 9]
    assert [line.split()[0] for line in table] == ["algorithm", *SYNCHRONOUS, "local_sgd", "stale"]
    record = run_reader.record(launcher.folder / "run")
    result = record["results"]
    assert all(result[name]["difference_to_ddp"] < 1e-12 for name in SYNCHRONOUS)
    assert f"{result['stale']['accuracy']:.2%}" in table[-1]
    assert [name for name in result if not result[name]["same_steps"]] == ["local_sgd", "stale"]
    (first, weights_of_first), (second, weights_of_second) = record["passed_on"]
    assert weights_of_first == weights_of_second > 0
    assert first != pytest.approx(second, rel=0.01)  # each rank's own, not averaged
    gradients, buckets = record["overlap"]["gradients"], record["overlap"]["buckets"]
    assert [name for name, _ in gradients] == ["3.bias", "3.weight", "1.bias", "1.weight"]
    assert [name for name, *_ in buckets] == ["3.bias .. 1.bias", "1.weight"]
    assert all(sent < done for _, sent, done in buckets)
    (_, first_sent, _), (_, last_sent, _) = buckets
    last_gradient = gradients[-1][1]
    assert first_sent < last_gradient < last_sent  # the first one is sent while the backward pass goes on
    for picture in ("times.png", "buckets.png"):
        assert (launcher.folder / "run" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_ring_leaves_the_sum_on_each_process(threads, monkeypatch, n):
    def exchange(operations):
        (_, outgoing, right), (_, incoming, left) = operations
        threads.send(outgoing, right)
        threads.recv(incoming, left)
        return []

    monkeypatch.setattr(dist, "P2POp", lambda *operation: operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    tensors = torch.arange(4.0 * n).view(n, 4)  # 4 numbers: parts of different sizes, or empty ones
    expected = tensors.sum(0)
    threads.run(n, lambda rank: ddp.ring_all_reduce(tensors[rank]))
    assert (tensors == expected).all()


def test_local_sgd_ends_with_equal_weights(threads, monkeypatch):
    """Also where the number of steps is not a multiple of --local_steps: 2 + 2 + 1."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]

    def backward(parameter, batch, scale):
        parameter.grad = torch.tensor([float(batch)])

    monkeypatch.setattr(ddp, "backward", backward)

    def run(rank):
        weight = weights[rank]
        weight.parameters = lambda: [weight]
        optimizer = torch.optim.SGD([weight], 1.0)
        ddp.local_sgd(weight, optimizer, [rank + 1] * 5, Namespace(local_steps=2))
        return weight.item()

    assert threads.run(2, run) == [-7.5, -7.5]


def test_buckets_hold_several_parameters_from_the_last_layer_on():
    sizes = (300, 60, 100, 60, 40, 7)  # float32 numbers; 256 of them are 1 KiB
    parameters = [torch.zeros(size) for size in sizes]
    buckets = ddp.make_buckets(parameters, bucket_kib=1)
    assert [[len(parameter) for parameter in bucket] for bucket in buckets] == [[7, 40, 60, 100], [60], [300]]
    assert len(ddp.make_buckets(parameters, bucket_kib=3)) == 1


@pytest.mark.parametrize(("bucket_kib", "count"), [(1, 2), (100, 1)])
def test_a_bucket_is_sent_when_it_is_full_and_used_after_wait(monkeypatch, bucket_kib, count):
    """Two processes with equal gradients, whose sum is there after `wait` and not before it."""
    sent = []

    class Sending:
        def __init__(self, bucket):
            self.bucket, self.before = bucket, bucket.clone()

        def wait(self):
            assert torch.equal(self.bucket, self.before)
            self.bucket *= 2

    def all_reduce(bucket, async_op):
        assert async_op
        assert bucket.ne(0).any()
        sent.append(len(bucket))
        return Sending(bucket)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(ddp, "backward", lambda model, x: model(x).sum().backward())
    torch.manual_seed(0)
    layers = [torch.nn.Linear(30, 30), torch.nn.SiLU(), torch.nn.Linear(30, 3)]
    model, expected = torch.nn.Sequential(*layers), torch.nn.Sequential(*copy.deepcopy(layers))
    batches = torch.randn(3, 5, 30)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ddp.bucketed(model, optimizer, batches, None, bucket_kib)
    assert len(sent) == 3 * count
    optimizer = torch.optim.SGD(expected.parameters(), 0.02)
    for x in batches:
        expected(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, right)
