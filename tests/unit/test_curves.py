import builtins
import json
import math

import numpy as np
import pytest
from PIL import Image

from utils import curves as plots


def line(split, step, **metrics):
    return {"split": split, "step": step, "epoch": 1, **metrics}


def curves(tmp_path, lines):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return plots.read_curves(path)


def pixels(path):
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB"))


def test_all_metrics_are_read_but_learning_rates_and_timings(tmp_path):
    lines = [
        line("train", 1, loss=2.0, lr=0.1, head_lr=0.1, samples_per_s=9.0, data_wait_pct=3.0),
        line("test", 1, loss=1.5, error_px=4, recall=[0.5, 1.0], note="x", best=True),
        line("validation", 1, other=1.0),
        line("train", 2, loss=math.nan),
        line("train", 3, loss=math.inf),
        line("train", 4, loss=1.0),
    ]
    assert curves(tmp_path, lines) == {
        "loss": {"train": [(1, 2.0), (4, 1.0)], "test": [(1, 1.5)]},
        "error_px": {"test": [(1, 4)]},
    }


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (2, 2), (3, 3), (5, 5), (9, 6)])
def test_one_panel_for_each_metric_up_to_six(tmp_path, count, grid):
    metrics = {f"metric_{number}": float(number) for number in range(count)}
    figure = plots.draw_curves(curves(tmp_path, [line("train", 1, **metrics)]), "run")
    panels = figure.axes
    assert [axes.get_ylabel() for axes in panels] == [f"metric_{i}" for i in range(grid)]
    columns = {round(axes.get_position().x0, 2) for axes in panels}
    figure.canvas.draw()
    assert len(columns) <= 3


def test_scales_follow_the_name_and_the_values(tmp_path):
    lines = []
    for step in range(1, 41):
        lines.append(
            line(
                "train",
                step,
                loss=1 / step,
                ema_loss=-1 / step,
                flat_loss=1 + step / 100,
                error=1 / step,
                accuracy=0.5,
                top5_accuracy=0.9,
            )
        )
    lines.append(line("test", 40, loss=0.1))
    figure = plots.draw_curves(curves(tmp_path, lines), "")
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    scales = {name: axes.get_yscale() for name, axes in panels.items()}
    assert scales.pop("loss") == "log"
    assert set(scales.values()) == {"linear"}
    figure.canvas.draw()
    percent = {name for name, axes in panels.items() if "%" in axes.get_yticklabels()[0].get_text()}
    assert percent == {"accuracy", "top5_accuracy"}
    train, test = panels["loss"].get_lines()
    assert (train.get_marker(), test.get_marker()) == ("None", "o")  # 40 points and one
    assert "test, last 0.1" in [text.get_text() for text in panels["loss"].get_legend().get_texts()]


@pytest.mark.parametrize("values", [[0.31], [0.301, 0.305], [1e-9, 5.0], [-3.0, 2.0], [0.0]])
def test_a_loss_axis_always_has_labels(tmp_path, values):
    lines = [line("test", step, loss=value) for step, value in enumerate(values)]
    figure = plots.draw_curves(curves(tmp_path, lines), "")
    figure.canvas.draw()
    axes = figure.axes[0]
    begin, end = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if begin <= tick <= end]


def test_curves_are_a_picture_and_no_metrics_are_none(tmp_path):
    lines = [line("train", step, loss=1 / step, accuracy=0.5) for step in range(1, 9)]
    curves(tmp_path, lines)
    plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", "run: 8 steps")
    assert pixels(tmp_path / "curves.png").shape[1] > 800
    (drawn,) = plots.draw_curves(curves(tmp_path, lines), "").axes[0].get_lines()
    assert drawn.get_xydata().tolist() == [[step, 1 / step] for step in range(1, 9)]
    curves(tmp_path, [line("train", 1, lr=0.1, loss=math.nan)])
    plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "none.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    curves(tmp_path, [line("train", 1, loss=1.0)])
    (tmp_path / ".part_curves.png").symlink_to("/dev/full")
    plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    said = capsys.readouterr().out
    assert said.startswith("warning: ")
    assert "No space left on device" in said
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, capsys, monkeypatch):
    plots.plot_curves(tmp_path / "missing.jsonl", tmp_path / "curves.png")
    assert "missing.jsonl" in capsys.readouterr().out
    real_import = builtins.__import__

    def without_matplotlib(name, *rest):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name="matplotlib")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    plots.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert "curves.png is not drawn without matplotlib: pip install" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
