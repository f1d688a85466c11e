"""Each collective is checked on every process, a wrong one is named, and slow pairs of ranks are found."""

import math
import threading
import time

import network_timing
import pytest
import run_reader
import torch
import torch.distributed as dist
from conftest import ROOT

from scripts.from_scratch import collectives


@pytest.mark.slow
def test_wrong_results_and_slow_pairs_are_named_with_their_rank(launcher, tmp_path):
    options = {"script": ROOT / "tests" / "programs" / "collectives_probe", "launch_flags": ("--num_processes", 3)}
    done = launcher("cpu_ddp", **options, check=False, timeout=90)
    said = {}
    for line in done.stdout.splitlines():
        if line.startswith("<"):
            case, text = line[1:].split("> ", 1)
            said[case] = text
    assert said["all right"] == "[] []"
    assert "all_reduce SUM, 12 bytes: on rank 1 1 of 3 numbers" in said["all_reduce"]
    assert "on rank 0" not in said["all_reduce"]
    assert "on rank 2" not in said["all_reduce"]
    assert "reduce SUM" not in said["reduce"]  # the mutant always sums
    for case, error in {
        "all_reduce": "new_group, 12 bytes: on rank 1 1 of 3 numbers",
        "broadcast": "of broadcast, 12 bytes: on rank 0",
        "reduce": "of reduce MAX, 12 bytes: on rank 0",
        "gather": "of gather, 12 bytes: on rank 0",
        "scatter": "of scatter, 12 bytes: on rank 2",
        "all_gather": "of all_gather, 12 bytes: on rank 1",
        "reduce_scatter": "of reduce_scatter, 12 bytes: on rank 0 1 of 1 numbers",
        "all_to_all": "of all_to_all, 12 bytes: on rank",
        "recv": "of send/recv, 12 bytes: on rank 2",
    }.items():
        assert error in said[case], case
    assert said["not supported"] == "[] ['reduce_scatter']"
    assert "(1, 2)" in said["slow"]
    # The run with a wrong all_reduce:
    assert done.returncode != 0
    assert [said[f"exit {rank}"] for rank in range(3)] == ["1", "1", "1"]
    assert "wrong result of all_reduce SUM, 12 bytes: on rank 2" in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
def test_two_processes_print_and_record_a_table(launcher):
    flags = ["--output_dir", "run", "--sizes", "1K", 8, "--explain"]
    done = launcher("cpu_ddp", *flags, script="from_scratch/collectives")
    assert "2 processes on 1 machine, cpu, gloo: 20 operations give" in done.stdout
    assert "one pair: no other" in done.stdout
    record = run_reader.record(launcher.folder / "run")
    assert record["num_processes"] == 2
    rows = {(row["operation"], row["bytes"]): row for row in record["results"]}
    assert set(rows) == {(name, size) for name in collectives.OPERATIONS for size in (8, 1024)}
    row = rows["all_gather", 1024]
    assert row["bus_gb_per_s"] == pytest.approx(1024 / row["time_us"] / 1e3 / 2)
    line = next(line for line in done.stdout.splitlines() if line.startswith("all_gather  "))
    assert f"{rows['all_gather', 8]['time_us']:,.0f} us" in line


def test_one_process_has_nothing_to_send(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["collectives.py", "--output_dir", str(tmp_path / "run")])
    collectives.main()
    assert "one process" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", ["--sizes 8 x", "--sizes 0", "--sizes 1T"])
def test_a_wrong_size_is_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["collectives.py", *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        collectives.parse_args()
    assert stopped.value.code == 2
    assert "--sizes" in capsys.readouterr().err


def test_sizes_have_units(monkeypatch):
    monkeypatch.setattr("sys.argv", ["collectives.py", "--sizes", "1M", "8", "4k", "2G", "8"])
    assert collectives.parse_args().sizes == [8, 4096, 2**20, 2**31]


BY_HAND = ("send/recv", "broadcast one by one", "broadcast tree", "broadcast ring", "reduce tree", "recv from any")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("name", BY_HAND)
def test_operations_by_hand_give_the_right_result_on_any_number_of_processes(threads, monkeypatch, name, n):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    inputs = collectives.make_inputs(2 * n, n, seed=0)

    def run(rank):
        world = collectives.World(rank, n, [])
        return collectives.check(collectives.OPERATIONS[name], inputs, world, torch.device("cpu"))

    assert threads.run(n, run) == [""] * n
    if name == "broadcast ring":
        assert len(threads.messages) == n * (n - 1)  # n chunks over n - 1 links
    else:
        assert len(threads.messages) == (n if name == "send/recv" else n - 1)
    if name == "broadcast tree":
        assert [sender for sender, _ in threads.messages].count(0) == math.ceil(math.log2(n))
    if name == "reduce tree":
        assert threads.rounds[0] == math.ceil(math.log2(n))


def test_the_slowest_process_counts(threads, monkeypatch):
    choose = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.SUM: torch.sum}

    def all_reduce(tensor, op):
        tensor.copy_(choose[op](torch.stack(threads.exchange(tensor)), 0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda: threads.barrier.wait())

    def run(rank):
        def call():
            time.sleep(0.1 if rank == 1 else 0)

        return network_timing.timed(call, 2, 1, torch.device("cpu"))

    for times in threads.run(3, run):
        assert len(times) == 2
        assert all(0.1 <= seconds < 0.25 for seconds in times)


def test_recv_from_any_takes_messages_in_any_order_and_only_with_its_tag(threads, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    inputs = collectives.make_inputs(6, 3, seed=0)
    earlier = threading.Event()

    def run(rank):
        if rank == 1:
            assert earlier.wait(10)
        if rank == 2:
            dist.send(torch.full((2,), -1.0), 0, tag=collectives.TAG + 1)
        x = inputs[rank].clone()
        result = collectives.recv_from_any(x, torch.zeros(6), collectives.World(rank, 3, []))
        if rank == 2:
            earlier.set()
        return result

    results = threads.run(3, run)
    assert torch.equal(results[0], collectives.gathered(inputs, 0, 3))


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("broadcast", (1, 1, 1)),
        ("all_reduce SUM", (1, 1.5, 1.75)),
        ("all_gather", (1 / 2, 3 / 4, 7 / 8)),
        ("reduce_scatter", (1 / 2, 3 / 4, 7 / 8)),
        ("new_group", (0, 1, 1.5)),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(name, factors):
    assert [collectives.OPERATIONS[name].bus_factor(n) for n in (2, 4, 8)] == pytest.approx(factors)


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
