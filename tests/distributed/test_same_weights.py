"""Processes whose weights or test results drift apart stop, and what differs is named."""

import math

import pytest
from conftest import ROOT

from utils.parallel import same_weights

PROGRAM = ROOT / "tests" / "programs" / "drifting"


@pytest.mark.slow
def test_a_layer_thawed_after_prepare_stops_the_run_and_is_named(launcher):
    done = launcher("cpu_ddp", "--output_dir", "thawed", script=PROGRAM, check=False)
    assert done.returncode != 0
    assert "the processes have different weights: model.0.weight on rank 1" in done.stderr
    steps = sorted(path.name for path in (launcher.folder / "thawed" / "checkpoints").glob("step_*"))
    assert steps == ["step_00000004"]  # of the epoch before
    launcher("cpu_ddp", "--output_dir", "all", "--thaw_in_epoch", -1, script=PROGRAM)


@pytest.mark.slow
def test_a_test_result_of_each_processs_own_samples_stops_the_run(launcher):
    done = launcher("cpu_ddp", "--own_result", "--thaw_in_epoch", -1, script=PROGRAM, check=False)
    assert done.returncode != 0
    assert "the processes have different test results: loss is " in done.stderr
    assert not (launcher.folder / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"loss": 0.5, "f1": math.nan}, ""),
        ({"loss": 0.5 + 1e-7, "f1": math.nan}, ""),  # rounding, on another kind of machine
        ({"loss": 0.51, "f1": math.nan}, "loss is 0.51 on rank 1, and 0.5 on rank 0; count by"),
        ({"loss": math.nan, "f1": math.nan}, "loss is nan on rank 1, and 0.5 on rank 0; count by"),
        ({"loss": 0.5, "f1": 0.0}, "f1 is 0.0 on rank 1, and nan on rank 0; count by"),
        ({"loss": 0.5}, "f1 is None on rank 1, and nan on rank 0"),
    ],
)
def test_numbers_of_a_test_are_the_same_up_to_rounding(monkeypatch, capsys, theirs, said):
    monkeypatch.setattr(same_weights, "gather_object", lambda mine: [*mine, theirs])
    if said:
        with pytest.raises(SystemExit):
            same_weights.check_result({"loss": 0.5, "f1": math.nan})
    else:
        same_weights.check_result({"loss": 0.5, "f1": math.nan})
    assert said in capsys.readouterr().err
