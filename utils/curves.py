"""curves.png: the metrics of a run over its steps.

Errors while drawing never end a run, because metrics.jsonl already has the numbers. `Figure` is used instead of pyplot,
which would choose a window system and keep every figure in memory.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from .atomic_files import write_atomically
from .best import is_number
from .console import show

COLOURS = {"train": "#0072b2", "test": "#d55e00"}
RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
NOT_PLOTTED = ("split", "step", "epoch", "samples_per_s", "data_wait_pct", "samples")
MAX_PANELS = 6
MAX_COLUMNS = 3
MARKERS_BELOW = 30  # curves with fewer points show each one


def save_picture(picture: Path, draw: Callable) -> None:
    """Call `draw()`, which returns a matplotlib Figure or None, and write it as a PNG; errors become warnings."""
    try:
        import matplotlib.figure  # noqa: F401  `draw` needs it
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = draw()
        if figure is not None:
            figure.set_dpi(120)
            # savefig would draw the figure twice.
            write_atomically(picture, FigureCanvasAgg(figure).print_png)
    except ModuleNotFoundError as error:
        show(f"{picture.name} is not drawn without {error.name}: pip install -r scripts/requirements.txt")
    except Exception as error:  # matplotlib cannot draw these values, the disk is full, ...
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        show(f"warning: {picture} cannot be drawn or written: {reason}", "yellow")


def plot_curves(metrics_file: Path, picture: Path, title: str = "") -> None:
    """Plot the first six metrics in metrics.jsonl, without learning rates and timings: a panel for each."""
    save_picture(picture, lambda: draw_curves(read_curves(metrics_file), title))


def read_curves(metrics_file: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Read metrics.jsonl as {metric: {split: [(step, value), ...]}}, with finite values only."""
    curves = {}
    for line in map(json.loads, metrics_file.read_text().splitlines()):
        for name, value in line.items() if line["split"] in COLOURS else ():
            if name not in NOT_PLOTTED and not name.endswith("lr") and is_number(value) and math.isfinite(value):
                curves.setdefault(name, {}).setdefault(line["split"], []).append((line["step"], value))
    return curves


def draw_curves(curves: dict[str, dict[str, list[tuple[int, float]]]], title: str):
    """Draw the result of `read_curves`; returns a Figure, or None if there is nothing to draw."""
    from matplotlib.figure import Figure

    names = list(curves)[:MAX_PANELS]
    if not names:
        return None
    columns = min(len(names), MAX_COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(5 * columns, 4.2 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        draw_panel(axes, name, curves[name])
    for axes in panels[len(names) :]:
        axes.remove()
    figure.suptitle(title)
    return figure


def draw_panel(axes, name: str, splits: dict[str, list[tuple[int, float]]]) -> None:
    """Draw one metric into a panel, with one curve per split."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    kind = name.rpartition("_")[2]  # "ema_loss" is a "loss"
    last = "{:.2%}" if kind == "accuracy" else "{:.4g}"
    for split, points in splits.items():
        steps, values = zip(*points, strict=True)
        marker = "o" if len(steps) < MARKERS_BELOW else None
        label = f"{split}, last {last.format(values[-1])}"
        axes.plot(steps, values, label=label, color=COLOURS[split], marker=marker, markersize=4)
    axes.legend()
    axes.set(xlabel="step (optimizer steps)", ylabel=name)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    values = [value for points in splits.values() for _, value in points]
    # Over less than a factor of five, a logarithmic axis would have at most one label.
    if kind == "loss" and min(values) > 0 and max(values) >= 5 * min(values):
        axes.set_yscale("log")
    if kind == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
