"""Machines are lost and come back while training goes on: the model has the bits of one process."""

import json

import pytest
from conftest import ROOT

from benchmarks import elastic

pytestmark = pytest.mark.slow


def test_lost_and_returned_machines_change_no_bit(launcher, small_mnist, tmp_path):
    flags = ["--dataset", small_mnist, "--machines", 2, "--steps_between", 100, "--events", 2]
    flags += ["--json", tmp_path / "out.json"]
    launcher.python(ROOT / "benchmarks" / "elastic.py", *flags, timeout=600)
    measured = json.loads((tmp_path / "out.json").read_text())
    # The machine with rank 0 and the rendezvous is lost, and comes back.
    assert [row[:2] for row in measured["rows"]] == [["lost", 1], ["back", 1]]
    assert [row[3] for row in measured["rows"]] == [1, 2]
    # --checkpoint_every 50: a loss finds the newest checkpoint unfinished where the disk is slow, never the one before.
    assert all(row[-1] <= 100 for row in measured["rows"])
    run, alone = measured["sha256"]
    assert run == alone
    assert elastic.report(measured)
