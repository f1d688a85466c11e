"""Machines are lost and come back while training goes on: the model has the bits of one process."""

import pytest
import run_reader
from conftest import ROOT

from benchmarks import elastic

pytestmark = pytest.mark.slow


def test_a_schedule_leaves_always_one_machine():
    for seed in range(50):
        here = {0, 1, 2}
        for kind, machine in elastic.schedule(3, 12, seed):
            assert (machine in here) == (kind == "lost")
            here ^= {machine}
            assert here


def test_lost_and_returned_machines_change_no_bit(hosts, launcher, small_mnist, tmp_path):
    flags = [*elastic.FLAGS, "--dataset", small_mnist]
    # More steps than any machine trains while another comes back: the others do not wait for it.
    flags += ["--virtual_processes", 4, "--max_steps", 1_000_000]
    agents = elastic.Agents(hosts, tmp_path, flags)
    # The machine with rank 0 and the rendezvous is lost first; then it is back, and the other goes.
    measured = elastic.disturb(agents, [("lost", 0), ("back", 0), ("lost", 1)], 150)
    assert [row[3] for row in measured["rows"]] == [1, 2, 1]
    assert all(row[-1] <= 60 for row in measured["rows"])  # --checkpoint_every 50, --log_every 10
    launches = run_reader.launches(tmp_path / "run")
    assert [each["num_processes"] for each in launches] == [2, 1, 2, 1]
    assert {each["virtual_processes"] for each in launches} == {4}

    saved = launches[-1]["from_step"] + 50
    agents.wait(lambda: agents.watch.step() > saved + 50, "a checkpoint after the last loss")
    hosts.kill(0)
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("step_????????"))
    step = int(checkpoint.name[5:])
    assert step >= saved
    alone = tmp_path / "alone"
    launcher.start("cpu", *flags, "--checkpoint_every", step, "--output_dir", alone)
    same = alone / "checkpoints" / checkpoint.name
    agents.wait(same.exists, "the same step of one process")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoint / file).read_bytes() == (same / file).read_bytes()


def test_the_documented_command_has_the_settings_that_are_tested():
    page = (ROOT / "accelerate_configs" / "README.md").read_text()
    for words in (
        "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "--max_restarts 100",
        "--rdzv_backend c10d",
    ):
        assert words in page
