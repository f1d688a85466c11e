"""Asynchronous SGD: no worker waits for another, no gradient is lost, and staleness is counted."""

import threading
from argparse import Namespace

import pytest
import run_reader
import torch
import torch.distributed as dist

from scripts.from_scratch import async_sgd

ARGS = Namespace(
    **{"lr": 0.5, "local_steps": 3, "delay": 2, "test_every": 2, "worker_batch_size": 4},
    **{"num_epochs": 1, "hidden": 5, "sleep_ms": 0.0, "seed": 0},
)


class Numbers:
    """A worker whose gradients are given: they do not depend on the weights."""

    def __init__(self, gradients):
        self.weights, self.gradients, self.seen = torch.zeros(1), iter(gradients), []
        self.num_workers, self.num_steps, self.group = 1, len(gradients), None

    def gradient(self):
        self.seen.append(self.weights.item())
        value = next(self.gradients)
        return torch.tensor([float(value() if callable(value) else value)])

    def keep_weights(self):
        pass

    def keep_weights_at(self, step):
        pass


def test_no_worker_waits_for_a_slow_one(threads):
    """The gradient of worker 2 comes after the server has applied all five of worker 1."""
    five_are_applied, late_one_is_applied = threading.Event(), threading.Event()

    def late():
        assert five_are_applied.wait(20)
        return 1000

    def after_the_end():
        five_are_applied.set()
        assert late_one_is_applied.wait(20)
        return 7

    workers = {1: Numbers([1, 2, 3, 4, 5, after_the_end]), 2: Numbers([late])}
    server = Numbers([])

    def run(rank):
        if rank == 0:
            # lr / num_workers is 1.
            return async_sgd.serve(server, 2, 6, Namespace(lr=2.0, test_every=1))
        async_sgd.asynchronous(workers[rank], ARGS)
        if rank == 2:
            late_one_is_applied.set()
        return None

    staleness = threads.run(3, run)[0]
    # The late gradient is applied too, and counted as five steps late.
    assert server.weights.item() == -1015
    assert staleness == [0, 0, 0, 0, 0, 5]
    assert workers[1].seen == [0, -1, -3, -6, -10, -15]
    assert workers[2].seen == [0]
    # Both end with the server's last weights.
    assert workers[1].weights.item() == workers[2].weights.item() == -1015


@pytest.mark.parametrize("way", ["synchronous", "local", "stale"])
def test_the_other_ways_apply_each_gradient_once(monkeypatch, way):
    class Work:
        def wait(self):
            self.tensor *= 2

    def all_reduce(tensor, group, async_op=False):
        """Two workers with the same numbers; the sum is there after `wait`."""
        work = Work()
        work.tensor = tensor
        return work if async_op else work.wait()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    worker = Numbers([1, 10, 100, 1000])
    worker.num_workers = 2
    staleness = async_sgd.WAYS[way](worker, Namespace(lr=1, local_steps=3, delay=2))
    assert worker.weights.item() == -1111
    assert staleness == {"stale": [0, 1, 2, 2]}.get(way, [0, 0, 0, 0])
    assert worker.seen == {"stale": [0, 0, 0, -1]}.get(way, [0, -1, -11, -111])


@pytest.mark.slow
def test_all_ways_are_compared(launcher, small_mnist):
    flags = ["--dataset", small_mnist, "--output_dir", "run", "--sleep_ms", 1, "--target", 0.3]
    flags += ["--stragglers", "last", "any"]
    launch_flags = ("--num_processes", 3)
    launcher("cpu_ddp", *flags, script="from_scratch/async_sgd", launch_flags=launch_flags)
    record = run_reader.record(launcher.folder / "run")
    results = {(result["straggler"], result["way"]): result for result in record["results"]}
    assert list(results) == [(who, way) for who in ("last", "any") for way in async_sgd.WAYS]
    # 3 epochs of 1003 images: 23 steps of two workers with 64 images each.
    assert results["last", "synchronous"]["accuracy"] == results["any", "synchronous"]["accuracy"]
    for (_, way), result in results.items():
        assert result["target_s"] <= result["total_s"]
        assert (result["max_staleness"] > 0) == (way in ("stale", "asynchronous"))
        assert result["mean_staleness"] <= result["max_staleness"]
    assert results["last", "stale"]["mean_staleness"] == pytest.approx(22 / 23)  # the first is not late
