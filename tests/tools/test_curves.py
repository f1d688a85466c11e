"""The metrics of a run, or of several runs in one picture."""

import functools
import json
import math
import sys

import numpy as np
import pytest
from PIL import Image
from run_folders import LINES, line, make_run
from run_tool import run_tool

from tools import curves
from tools.compare import read_runs


def read(tmp_path, lines=LINES):
    return curves.read_curves(read_runs([make_run(tmp_path / "run", lines)])[0])


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in tmp_path; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return functools.partial(run_tool, curves.main, capsys)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def pixels(path):
    with Image.open(path) as picture:
        return np.array(picture.convert("RGB"))


def test_all_metrics_are_read_but_learning_rates_and_timings(tmp_path):
    lines = [
        line(1, loss=2.0, lr=0.1, head_lr=0.1, samples_per_s=9.0, data_wait_pct=3.0),
        line(1, "test", loss=1.5, error_px=4, samples=7, recall=[0.5, 1.0], note="x", best=True),
        line(1, "validation", other=1.0),
        line(2, loss=math.nan),
        line(3, loss=math.inf),
        line(4, loss=1.0),
    ]
    assert read(tmp_path, lines) == {
        "loss": {"train": [(1, 2.0), (4, 1.0)], "test": [(1, 1.5)]},
        "error_px": {"test": [(1, 4)]},
    }


def test_the_first_six_metrics_have_a_panel_with_a_scale_of_its_name_and_its_values(tmp_path):
    others = {"accuracy": 0.5, "top5_accuracy": 0.9, "seventh": 1.0}
    losses = [{"loss": 1 / n, "ema_loss": -1 / n, "flat_loss": 1 + n / 100, "error": 1 / n} for n in range(1, 41)]
    lines = [line(step, **metrics, **others) for step, metrics in enumerate(losses, 1)]
    lines.append(line(40, "test", loss=0.1))
    panels = {axes.get_ylabel(): axes for axes in curves.draw({"run": read(tmp_path, lines)}).axes}
    scales = {name: axes.get_yscale() for name, axes in panels.items()}
    linear = ["ema_loss", "flat_loss", "error", "accuracy", "top5_accuracy"]
    assert scales == {"loss": "log", **dict.fromkeys(linear, "linear")}
    train, test = panels["loss"].get_lines()
    assert train.get_xydata().tolist() == [[step, 1 / step] for step in range(1, 41)]
    assert (train.get_marker(), test.get_marker()) == ("None", "o")  # 40 points and one
    assert train.get_color() != test.get_color()
    assert "test, last 0.1" in [text.get_text() for text in panels["loss"].get_legend().get_texts()]


@pytest.mark.parametrize("values", [[0.31], [0.301, 0.305], [1e-9, 5.0], [-3.0, 2.0], [0.0]])
def test_a_loss_axis_always_has_labels(tmp_path, values):
    lines = [line(step, "test", loss=value) for step, value in enumerate(values)]
    figure = curves.draw({"run": read(tmp_path, lines)})
    figure.canvas.draw()
    axes = figure.axes[0]
    begin, end = axes.get_ylim()
    assert [tick for tick in axes.get_yticks() if begin <= tick <= end]


def test_several_runs_share_panels_and_differ_in_colour(tmp_path):
    """Each has the colour beside its name in the legend; train and test differ in the line."""
    runs = {f"run {number}": read(tmp_path / f"{number}", LINES) for number in range(6)}
    runs["other"] = read(tmp_path / "other", [line(1, "test", bits=3.0)])
    figure = curves.draw(runs)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy", "bits"]
    (legend,) = figure.legends
    shown = {text.get_text(): one for text, one in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    assert list(shown) == [*runs, "train", "test"]
    colours = [shown[name].get_color() for name in runs]
    assert len(set(colours)) == 7
    loss, _, bits = figure.axes
    drawn = [(one.get_color(), one.get_linestyle()) for one in loss.get_lines()]
    assert drawn == [(colour, shown[split].get_linestyle()) for colour in colours[:6] for split in ("train", "test")]
    assert shown["train"].get_linestyle() != shown["test"].get_linestyle()
    assert [one.get_color() for one in bits.get_lines()] == colours[6:]


def test_a_picture_lies_where_it_says(tmp_path, command):
    """That of one run, also one that goes on, in its folder; that of several in the current one; it is replaced."""
    make_run(tmp_path / "runs" / "a", tail='{"split": "train", "st')
    make_run(tmp_path / "runs" / "b")
    before = files(tmp_path)
    assert command("runs/a") == (0, "drawn: runs/a/curves.png\n")
    assert pixels(tmp_path / "runs" / "a" / "curves.png").shape[1] > 800
    assert command("runs/a", "runs/b") == (0, "drawn: curves.png\n")
    (tmp_path / "both.png").write_text("an earlier one")
    assert command("runs/a", "runs/b", "--output", "both.png") == (0, "drawn: both.png\n")
    assert np.array_equal(pixels(tmp_path / "both.png"), pixels(tmp_path / "curves.png"))
    assert files(tmp_path) - before == {"runs/a/curves.png", "curves.png", "both.png"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["empty"], "empty has no metrics to draw"),
        (["damaged"], "damaged/metrics.jsonl is damaged: line 4 is not a JSON object"),
        (["a"] * 8, "8 runs in one picture cannot be told apart: name at most 7"),
        (["a", "--output", "a/metrics.jsonl"], "--output a/metrics.jsonl does not end with .png"),
        (["a", "--output", "full.png"], "full.png cannot be written: No space left on device"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path, command, words, sentence):
    make_run(tmp_path / "a")
    make_run(tmp_path / "empty", [line(1, lr=0.1, loss=math.nan)])
    make_run(tmp_path / "damaged", tail="{\n" + json.dumps(line(3, loss=1.0)) + "\n")
    (tmp_path / ".part_full.png").symlink_to("/dev/full")
    before = files(tmp_path)
    code, said = command(*words)
    assert code == 2
    assert said.startswith(f"error: {sentence}")
    assert len(said.splitlines()) == 1
    assert files(tmp_path) == before


def test_without_matplotlib_it_says_what_to_install(tmp_path, command, monkeypatch):
    make_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command("a") == (2, "error: drawing needs matplotlib: pip install -r scripts/requirements.txt\n")
