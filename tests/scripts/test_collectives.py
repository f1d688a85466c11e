"""Collectives by hand are right, a wrong result is seen, and slow pairs of ranks are found."""

import math

import network_timing
import pytest
import run_reader
import torch
import torch.distributed as dist

from scripts.from_scratch import collectives


@pytest.mark.slow
def test_two_processes_time_each_operation(launcher):
    flags = ["--output_dir", "run", "--sizes", "1K", 8, "--explain"]
    done = launcher("cpu_ddp", *flags, script="from_scratch/collectives")
    assert "24 operations give the right results" in done.stdout
    results = run_reader.record(launcher.folder / "run")["results"]
    rows = {(row["operation"], row["bytes"]): row for row in results}
    assert set(rows) == {(name, size) for name in collectives.OPERATIONS for size in (8, 1024)}
    row = rows["all_gather", 1024]
    assert row["bus_gb_per_s"] == pytest.approx(1024 / row["time_us"] / 1e3 / 2)


def checked(threads, monkeypatch, name, n) -> list[str]:
    """What each of n ranks finds wrong with the result of an operation."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    inputs = collectives.make_inputs(2 * n, n, seed=0)

    def run(rank):
        world = collectives.World(rank, n, [])
        return collectives.check(collectives.OPERATIONS[name], inputs, world, torch.device("cpu"))

    return threads.run(n, run)


BY_HAND = ("send/recv", "broadcast one by one", "broadcast tree", "broadcast ring", "reduce tree", "recv from any")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("name", BY_HAND)
def test_operations_by_hand_give_the_right_result_on_any_number_of_processes(threads, monkeypatch, name, n):
    assert checked(threads, monkeypatch, name, n) == [""] * n
    if name == "broadcast ring":
        assert len(threads.messages) == n * (n - 1)  # n chunks over n - 1 links
    else:
        assert len(threads.messages) == (n if name == "send/recv" else n - 1)
    if name == "broadcast tree":
        assert [sender for sender, _ in threads.messages].count(0) == math.ceil(math.log2(n))
    if name == "reduce tree":
        assert threads.rounds[0] == math.ceil(math.log2(n))


def test_a_wrong_number_is_seen_on_the_process_that_has_it(threads, monkeypatch):
    def broadcast(tensor, src):
        threads.broadcast(tensor, src)
        tensor[1] += threads.here.rank == 2

    assert checked(threads, monkeypatch, "broadcast", 3) == [""] * 3
    monkeypatch.setattr(dist, "broadcast", broadcast)
    first, second, third = checked(threads, monkeypatch, "broadcast", 3)
    assert first == second == ""
    assert third.startswith("1 of 6 numbers, [1] is ")


def test_a_slow_pair_stands_out_and_a_slow_host_is_named():
    fast, slow, late = (10e-6, 1e9), (10e-6, 0.4e9), (35e-6, 1e9)
    ranks = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert network_timing.slow_pairs(dict.fromkeys(ranks, fast)) == []
    assert network_timing.slow_pairs({(0, 1): slow}) == []
    assert network_timing.slow_pairs({**dict.fromkeys(ranks, fast), (1, 3): slow}) == [(1, 3)]
    pairs = {**dict.fromkeys(ranks, fast), (1, 3): slow, (2, 3): late}
    assert network_timing.slow_pairs(pairs) == [(1, 3), (2, 3)]
    text = network_timing.describe_pairs(pairs, ["a", "b", "c", "d"])
    assert "1 (b) - 3 (d): 10 us, 0.400 GB/s  SLOW" in text
    assert "rank 3 (d) is in all 2 slow pairs" in text
    assert text.count("SLOW") == 2
