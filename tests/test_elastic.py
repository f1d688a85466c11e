"""Machines are lost and come back while training goes on: the model has the bits of one process."""

import json

import pytest
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
    flags = [*elastic.FLAGS, "--dataset", small_mnist, "--activation", "relu"]
    # Far more updates than pass while a machine comes back: the others do not wait for it.
    flags += ["--max_steps", 3000]
    # The machine with rank 0 and the rendezvous is lost first; then it is back, and the other goes.
    measured = elastic.disturbed(
        hosts, tmp_path, [("lost", 0), ("back", 0), ("lost", 1)], 150, flags
    )
    assert [row[3] for row in measured["rows"]] == [1, 2, 1]
    assert all(row[-1] <= 60 for row in measured["rows"])  # --checkpoint_every 50, --log_every 10
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert [each["num_processes"] for each in launches] == [2, 1, 2, 1]
    assert {each["virtual_processes"] for each in launches} == {8}
    launcher("cpu", *flags, "--output_dir", tmp_path / "alone", timeout=400)
    for file in ("model.safetensors", "checkpoints/step_00003000/optimizer.safetensors"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()


def test_the_documented_command_has_the_settings_that_are_tested():
    page = (ROOT / "accelerate_configs" / "README.md").read_text()
    for words in (
        "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "--max_restarts 100",
        "--rdzv_backend c10d",
    ):
        assert words in page
