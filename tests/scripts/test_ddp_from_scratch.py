"""Data parallelism by hand ends with DDP's weights, and DDP with those of one process; averages and their bytes."""

import pytest
import run_reader
import torch
import torch.distributed as dist

from scripts.from_scratch import averaging, ddp

SCRIPT = "from_scratch/ddp"
FLAGS = ["--num_epochs", "2", "--dtype", "float64"]
SYNCHRONOUS = ["ddp", "one_by_one", "reduce_broadcast", "flat_copy", "bucketed", "ring"]


@pytest.mark.slow
def test_each_way_ends_with_the_weights_of_ddp_and_of_one_process(launcher, small_mnist):
    """The last step of an epoch has 3 of 1003 images."""
    flags = ["--dataset", small_mnist, *FLAGS, "--batch_size", 500]
    launcher("cpu_ddp", *flags, "--output_dir", "run", script=SCRIPT)
    record = run_reader.record(launcher.folder / "run")
    result = record["results"]
    launcher("cpu_ddp", *flags, "--output_dir", "one", "--delay", 0, script=SCRIPT, launch_flags=["--num_processes", 1])
    one = run_reader.record(launcher.folder / "one")["results"]
    for name in SYNCHRONOUS:
        assert result[name]["difference_to_ddp"] < 1e-12, name
        assert result[name]["loss"] == pytest.approx(one["ddp"]["loss"], rel=1e-12)
        assert result[name]["accuracy"] == one["ddp"]["accuracy"]
    for name in ("local_sgd", "stale"):
        assert result[name]["difference_to_ddp"] > 1e-3, name
        assert one[name]["difference_to_ddp"] < 1e-12, name  # one process, whose gradients are not late
    assert [name for name in result if not result[name]["same_steps"]] == ["local_sgd", "stale"]
    (first, weights_of_first), (second, weights_of_second) = record["passed_on"]
    assert weights_of_first == weights_of_second > 0
    assert first != pytest.approx(second, rel=0.01)  # each rank's own, not averaged
    assert len(record["overlap"]) == 2
    for of_rank in record["overlap"]:
        gradients, buckets = of_rank["gradients"], of_rank["buckets"]
        assert [name for name, _ in gradients] == ["3.bias", "3.weight", "1.bias", "1.weight"]
        assert [name for name, *_ in buckets] == ["3.bias .. 1.bias", "1.weight"]
        (_, first_sent, _), (_, last_sent, _) = buckets
        assert first_sent < gradients[-1][1] < last_sent  # the first one is sent while the backward pass goes on
    for ours, theirs in zip(*(of_rank["buckets"] for of_rank in record["overlap"]), strict=True):
        assert min(ours[2], theirs[2]) > max(ours[1], theirs[1])  # no sum is there before both have sent


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


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_server_sends_the_mean_to_each(threads, n):
    gradients = averaging.make_gradients(7, n, seed=0)

    def run(rank):
        gradient = gradients[rank].clone()
        averaging.parameter_server(gradient, rank, n, None)
        return gradient

    for gradient in threads.run(n, run):
        assert torch.equal(gradient, gradients.sum(0) / n)
    assert sorted(threads.messages) == sorted(pair for other in range(1, n) for pair in ((0, other), (other, 0)))


@pytest.mark.slow
def test_rank_0_sends_most_through_a_server(launcher):
    """As the kernel counts it: n - 1 gradients by the server, 2 (n-1)/n by a process of a ring."""
    flags = ["--output_dir", "run", "--size_mib", 1, "--repetitions", 3, "--warmup", 1]
    launcher("cpu_ddp", *flags, script="from_scratch/averaging", launch_flags=("--num_processes", 3))
    results = run_reader.record(launcher.folder / "run")["results"]
    sent = {(row["processes"], row["way"]): row["sent_mib"] for row in results}
    assert len(sent) == 3 * len(averaging.WAYS)
    for n in (1, 2, 3):
        assert sent[n, "parameter server"] == pytest.approx(n - 1, abs=0.05)
        assert sent[n, "all_reduce"] == pytest.approx(2 * (n - 1) / n, abs=0.05)
    assert sent[3, "reduce, broadcast"] > sent[3, "all_reduce"]
