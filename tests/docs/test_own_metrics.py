"""The adapter for torchmetrics of guides/reference/recipes.md: tests/programs/own_metrics.py runs with it."""

import inspect

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from pages import blocks, guide, section

torchmetrics = pytest.importorskip("torchmetrics")

PROGRAM = ROOT / "tests" / "programs" / "own_metrics.py"


def test_the_adapter_on_the_page_is_the_programs():
    from tests.programs.own_metrics import OverAllSamples

    (block,) = blocks(section(guide("reference/recipes"), "Metrics of torchmetrics"), "python")
    assert inspect.getsource(OverAllSamples) in block


@pytest.mark.slow
def test_the_metrics_of_any_number_of_processes_are_those_of_the_whole_data_set(launcher):
    """On 3 processes one has no sample of the last batch; 25 do not divide, nor do 77. torchmetrics uses float32."""
    for processes, config in ((1, "cpu"), (2, "cpu_ddp"), (3, "cpu_ddp")):
        words = run_many.words("own_metrics", ["--output_dir", launcher.folder / str(processes)])
        flags = ["--num_processes", processes] if processes > 1 else []
        launcher(config, *words, script=run_many.FILE, launch_flags=flags)

    from tests.programs.own_metrics import CLASSES, make_points

    points, labels = make_points(77).tensors
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)).double()
    model.load_state_dict(run_reader.weights(launcher.folder / "1"))
    scores = model(points).softmax(1)
    of_classes = {"task": "multiclass", "num_classes": CLASSES}
    expected = {
        "auroc": torchmetrics.AUROC(**of_classes)(scores, labels).item(),
        "f1": torchmetrics.F1Score(**of_classes, average="macro")(scores, labels).item(),
        "calibration": torchmetrics.CalibrationError(**of_classes)(scores, labels).item(),
    }
    for processes in (1, 2, 3):
        *_, last = run_reader.lines(launcher.folder / str(processes), "test")
        assert last["samples"] == 77
        assert {name: last[name] for name in expected} == pytest.approx(expected, rel=1e-6)
