"""Gradients averaged through rank 0 and by an all-reduce: the same mean, and known traffic."""

import time
from argparse import Namespace

import pytest
import run_reader
import torch
import torch.distributed as dist

from scripts.from_scratch import averaging


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_server_sends_the_mean_to_each(threads, n):
    gradients = averaging.make_gradients(7, n, seed=0)

    def run(rank):
        gradient = gradients[rank].clone()
        averaging.parameter_server(gradient, rank, n, None)
        return gradient

    for gradient in threads.run(n, run):
        assert torch.equal(gradient, gradients.sum(0) / n)
    assert sorted(threads.messages) == sorted(
        [(0, other) for other in range(1, n)] + [(other, 0) for other in range(1, n)]
    )


def test_a_wrong_mean_ends_the_run(monkeypatch, capsys):
    """For example by a way that forgets to divide."""
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *words, **options: None)
    args = Namespace(warmup=0, repetitions=1)
    gradients = averaging.make_gradients(7, 1, seed=0)

    def sums(gradient, rank, n, group):
        gradient *= 2

    with pytest.raises(SystemExit):
        averaging.measure(sums, gradients, 0, None, args, torch.device("cpu"))
    assert "sums on rank 0 of 1" in capsys.readouterr().err


def test_the_slowest_process_and_the_one_that_sends_most_count(threads, monkeypatch):
    choose = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}
    gradients = averaging.make_gradients(7, 2, seed=0)
    written = [iter([0, 5, 5, 10]), iter([0, 3, 3, 10])]

    def all_reduce(tensor, op, group):
        tensor.copy_(choose[op](torch.stack(threads.exchange(tensor)), 0))

    def way(gradient, rank, n, group):
        time.sleep(0.1 * rank)
        gradient.copy_(gradients.sum(0) / n)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda group: threads.barrier.wait())
    monkeypatch.setattr(averaging, "written_bytes", lambda: next(written[threads.here.rank]))
    args = Namespace(warmup=1, repetitions=1)

    def run(rank):
        return averaging.measure(way, gradients, rank, None, args, torch.device("cpu"))

    for measured in threads.run(2, run):
        assert 100 <= measured["time_ms"] < 250
        assert measured["sent_mib"] == 7 / averaging.MIB


@pytest.mark.slow
def test_rank_0_sends_most_through_a_server(launcher):
    """As the kernel counts it: n - 1 gradients by the server, 2 (n-1)/n by a process of a ring."""
    flags = ["--output_dir", "run", "--size_mib", 1, "--repetitions", 3, "--warmup", 1]
    done = launcher("cpu_ddp", *flags, script="from_scratch/averaging", launch_flags=("--num_processes", 3))
    results = run_reader.record(launcher.folder / "run")["results"]
    sent = {(row["processes"], row["way"]): row["sent_mib"] for row in results}
    assert len(sent) == 3 * len(averaging.WAYS)
    for n in (1, 2, 3):
        assert sent[n, "parameter server"] == pytest.approx(n - 1, abs=0.05)
        assert sent[n, "all_reduce"] == pytest.approx(2 * (n - 1) / n, abs=0.05)
    assert sent[3, "reduce, broadcast"] > sent[3, "all_reduce"]
    assert (launcher.folder / "run" / "averaging.png").read_bytes().startswith(b"\x89PNG")
    assert f"{sent[3, 'parameter server']:.2f}" in done.stdout


def test_one_process_has_nothing_to_send(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["averaging.py", "--output_dir", str(tmp_path / "run")])
    averaging.main()
    assert "one process" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
