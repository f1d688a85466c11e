"""Metrics that are not means, by the recipes of guides/reference/recipes.md: regression.py, own_metrics.py."""

import inspect
from importlib.util import find_spec

import numpy as np
import pytest
import run_many
import run_reader
import torch
from pages import blocks, guide, section
from torch import nn

needs_torchmetrics = pytest.mark.others("torchmetrics")
FLAGS = {"regression": ["--float64", "--num_epochs", 2], "own_metrics": []}
each_program = pytest.mark.parametrize("program", ["regression", pytest.param("own_metrics", marks=needs_torchmetrics)])


@torch.no_grad()
def expected(program, folder) -> dict[str, float]:
    """The metrics of a run's last test: of its model, over the whole test set in one call."""
    if program == "regression":
        from examples.regression import make_points

        torch.set_default_dtype(torch.float64)
        inputs, targets = make_points(77).tensors
        torch.set_default_dtype(torch.float32)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()
        model.load_state_dict(run_reader.weights(folder))
        return {"correlation": np.corrcoef(model(inputs)[:, 0], targets[:, 0])[0, 1]}
    import torchmetrics

    from examples.own_metrics import CLASSES, make_points

    points, labels = make_points(77).tensors
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    model.load_state_dict(run_reader.weights(folder))
    scores = model(points).softmax(1)
    of_classes = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "auroc": torchmetrics.AUROC(**of_classes)(scores, labels).item(),
        "f1": torchmetrics.F1Score(**of_classes, average="macro")(scores, labels).item(),
        "calibration": torchmetrics.CalibrationError(**of_classes)(scores, labels).item(),
    }


def check(program, folder):
    *_, last = run_reader.lines(folder, "test")
    assert last["samples"] == 77
    rel = 1e-12 if program == "regression" else 1e-6  # torchmetrics uses float32
    metrics = expected(program, folder)
    assert {name: last[name] for name in metrics} == pytest.approx(metrics, rel=rel)


@needs_torchmetrics
def test_the_adapter_on_the_page_is_the_programs():
    from examples.own_metrics import OverAllSamples

    (block,) = blocks(section(guide("reference/recipes"), "Metrics of torchmetrics"), "python")
    assert inspect.getsource(OverAllSamples) in block


@each_program
def test_one_process_has_the_metrics_of_the_whole_dataset(tmp_path, program):
    assert run_many.run(program, [*FLAGS[program], "--output_dir", tmp_path / "run"]) is None
    check(program, tmp_path / "run")


@pytest.fixture(scope="module")
def runs(shared_launcher):
    """Runs of the programs whose libraries are installed, on three processes."""
    programs = ["regression", *["own_metrics"] * bool(find_spec("torchmetrics"))]
    launches = []
    for program in programs:
        script = ["--script", run_many.path_of(program)]
        launches.append([*script, *FLAGS[program], "--output_dir", shared_launcher.folder / program])
    words = run_many.words("regression", *launches)
    shared_launcher("cpu_ddp", *words, script=run_many.FILE, launch_flags=["--num_processes", 3])
    return shared_launcher.folder


@pytest.mark.slow
@each_program
def test_several_processes_have_the_metrics_of_the_whole_dataset(runs, program):
    """One of three has no sample of the last batch; 25 do not divide, nor do 77."""
    check(program, runs / program)
