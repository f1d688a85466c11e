"""Two machines with two processes each, as real as one machine can make them: see hosts.py."""

import shutil
import sys

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT, free_port
from network import ADDRESSES, NAMES

FLAGS = ["--num_epochs", 6, "--batch_size", 64, "--lr", 1e-3, "--log_every", 1]


@pytest.fixture
def one_process(tmp_path, small_mnist, home):
    run = tmp_path / "one"
    assert run_many.run("mnist_mlp", [*FLAGS, "--dataset", small_mnist, "--output_dir", run]) is None
    return run


def compare(one, two):
    for a, b in zip(run_reader.lines(one), run_reader.lines(two), strict=True):
        assert (b["split"], b["step"], b["accuracy"]) == (a["split"], a["step"], a["accuracy"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
    weights = [run_reader.weights(run) for run in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_machines_train_the_model_of_one_process(hosts, one_process, small_mnist, tmp_path):
    """Each machine in a folder of its own: only the main process writes. To resume, all need the run's folder."""
    # On a stock Debian a host's name is 127.0.1.1 to itself. gloo takes that address, if nobody
    # tells it another.
    hosts.network.write_etc_hosts(("127.0.1.1", "127.0.1.1"))
    folders = [tmp_path / "on" / name for name in NAMES]
    for folder in folders:
        folder.mkdir(parents=True)
    flags = [*FLAGS, "--dataset", small_mnist, "--output_dir", "run"]
    running = hosts.launch(*flags, each=[{"cwd": folder} for folder in folders], processes=4)
    assert hosts.ends(running)[0] == [0, 0], hosts.log(0) + hosts.log(1)
    assert not list(folders[1].iterdir())
    run = folders[0] / "run"
    compare(one_process, run)
    (launch,) = run_reader.launches(run)
    assert (launch["num_processes"], launch["backend"]) == (4, "gloo")
    assert [(each["rank"], each["local_rank"], each["host"]) for each in launch["processes"]] == [
        (0, 0, "alpha"),
        (1, 1, "alpha"),
        (2, 0, "beta"),
        (3, 1, "beta"),
    ]
    assert all("4 processes on 2 machines (MULTI_CPU over gloo)" in hosts.log(host) for host in (0, 1))
    again = run_many.back_to(run, 80, folders[0] / "again")
    flags[-1] = "again"
    running = hosts.launch(*flags, "--resume", each=[{"cwd": folder} for folder in folders], processes=4)
    assert 0 not in hosts.ends(running)[0], hosts.tails()
    assert "step_00000080 is intact, but rank 2 cannot read it (manifest.json: " in hosts.tails()
    assert len(run_reader.launches(again)) == 1
    shutil.copytree(again, folders[1] / "again")
    running = hosts.launch(*flags, "--resume", each=[{"cwd": folder} for folder in folders], processes=4)
    assert hosts.ends(running)[0] == [0, 0], hosts.log(0) + hosts.log(1)
    assert [launch["from_step"] for launch in run_reader.launches(again)] == [0, 80]
    compare(one_process, again)


HSDP = {"config": "hsdp", "processes": 4, "launch_flags": ["--parallelism_config_dp_shard_size", 2]}


@pytest.mark.slow
def test_a_replica_on_each_machine_trains_the_model_of_one_process_also_after_a_kill(hosts, one_process, small_mnist):
    flags = [*FLAGS, "--dataset", small_mnist, "--checkpoint_every", 1, "--output_dir", "run", "--resume"]
    running = hosts.launch(*flags, **HSDP)
    hosts.wait_for("step 10/96")
    hosts.kill(1)
    assert 0 not in hosts.ends(running)[0], hosts.tails()
    running = hosts.launch(*flags, **HSDP)
    assert hosts.ends(running)[0] == [0, 0], hosts.tails()
    run = hosts.folder / "run"
    compare(one_process, run)
    launches = run_reader.launches(run)
    assert len(launches) == 2
    assert 5 < launches[1]["from_step"] < 96
    assert {launch["distributed_type"] for launch in launches} == {"HSDP 2 x 2"}
    assert [each["host"] for each in launches[1]["processes"]] == ["alpha", "alpha", "beta", "beta"]
    last = run_reader.last_checkpoint(run)
    assert {file.name for file in last.glob("model*")} == {"model.safetensors", "model.rank_1.safetensors"}


@pytest.mark.slow
def test_torchrun_starts_it_too(hosts, one_process, small_mnist):
    """One process on each machine, so that what torchrun is told differs from the test above in
    more than its name."""
    port = free_port()
    words = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d"]
    words += ["--rdzv_endpoint", f"{ADDRESSES[0]}:{port}", ROOT / "scripts" / "mnist_mlp.py", *FLAGS]
    words += ["--dataset", small_mnist, "--output_dir", "run"]
    running = [hosts.start(host, sys.executable, *words, CUDA_VISIBLE_DEVICES="") for host in (0, 1)]
    assert hosts.ends(running)[0] == [0, 0], hosts.log(0) + hosts.log(1)
    compare(one_process, hosts.folder / "run")
