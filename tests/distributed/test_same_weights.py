"""Processes whose weights drift apart stop before the next checkpoint."""

import pytest
from conftest import ROOT

PROGRAM = ROOT / "tests" / "programs" / "drifting"


@pytest.mark.slow
def test_a_layer_thawed_after_prepare_stops_the_run_and_is_named(launcher):
    done = launcher("cpu_ddp", "--output_dir", "thawed", script=PROGRAM, check=False)
    assert done.returncode != 0
    assert "the processes have different weights: model.0.weight on rank 1" in done.stderr
    steps = sorted(path.name for path in (launcher.folder / "thawed" / "checkpoints").glob("step_*"))
    assert steps == ["step_00000004"]  # of the epoch before
    launcher("cpu_ddp", "--output_dir", "all", "--thaw_in_epoch", -1, script=PROGRAM)
