"""Gradients averaged through rank 0 and by an all-reduce: the same mean, and known traffic."""

import pytest
import run_reader
import torch

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
