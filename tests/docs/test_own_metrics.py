"""Metrics that are not means, by the recipes of guides/reference/recipes.md: regression.py, own_metrics.py."""

import inspect

import numpy as np
import pytest
import run_many
import run_reader
import torch
from pages import blocks, guide, section
from torch import nn

needs_torchmetrics = pytest.mark.others("torchmetrics")


@torch.no_grad()
def expected(program, folder) -> dict[str, float]:
    """The metrics of a run's last test: of its model, over the whole test set in one call."""
    if program == "regression":
        from examples.regression import make_points

        inputs, targets = make_points(77).tensors
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        model.load_state_dict(run_reader.weights(folder))
        return {"correlation": np.corrcoef(model(inputs)[:, 0], targets[:, 0])[0, 1]}
    import torchmetrics

    from examples.own_metrics import CLASSES, make_points

    points, labels = make_points(77).tensors
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    model.load_state_dict(run_reader.weights(folder))
    scores = model(points).softmax(1)
    of_classes = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "auroc": torchmetrics.AUROC(**of_classes)(scores, labels).item(),
        "f1": torchmetrics.F1Score(**of_classes, average="macro")(scores, labels).item(),
        "calibration": torchmetrics.CalibrationError(**of_classes)(scores, labels).item(),
    }


@needs_torchmetrics
def test_the_adapter_on_the_page_is_the_programs():
    from examples.own_metrics import OverAllSamples

    (block,) = blocks(section(guide("reference/recipes"), "Metrics of torchmetrics"), "python")
    assert inspect.getsource(OverAllSamples) in block


@pytest.mark.parametrize("program", ["regression", pytest.param("own_metrics", marks=needs_torchmetrics)])
def test_a_run_has_the_metrics_of_the_whole_dataset(tmp_path, float64, program):
    """On two processes, each program has the same ones: test_users_programs.py."""
    assert run_many.run(program, ["--num_epochs", 2, "--output_dir", tmp_path / "run"]) is None
    *_, last = run_reader.lines(tmp_path / "run", "test")
    assert last["samples"] == 77
    rel = 1e-12 if program == "regression" else 1e-6  # torchmetrics uses float32
    metrics = expected(program, tmp_path / "run")
    assert {name: last[name] for name in metrics} == pytest.approx(metrics, rel=rel)
