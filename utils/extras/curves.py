"""curves.png: the metrics of a run over its steps.

Errors while drawing never end a run, because metrics.jsonl already has the numbers. `Figure` is used instead of pyplot,
which would choose a window system and keep every figure in memory.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from ..atomic_files import write_atomically
from ..console import show
from .best import is_number

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
    except Exception as error:  # matplotlib is missing or cannot draw these values, the disk is full, ...
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        show(f"warning: {picture} cannot be drawn or written: {reason}", "yellow")


def plot_curves(metrics_file: Path, picture: Path, title: str = "") -> None:
    """Plot the first six metrics in metrics.jsonl, without learning rates and timings: a panel for each."""
    save_picture(picture, lambda: draw_curves(read_curves(metrics_file), title))


def read_curves(metrics_file: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Read metrics.jsonl as {metric: {split: [(step, value), ...]}}, with finite values only.

    A train line is a mean over the steps since the previous one. The last line of an epoch may cover only a few steps,
    whose noisy mean would look like a cliff, so it is skipped if it covers less than a quarter of the previous line's.
    """
    curves = {}
    last_step, last_steps, last_epoch = 0, 0, None
    for line in map(json.loads, metrics_file.read_text().splitlines()):
        if line.get("split") not in COLOURS:
            continue
        if line["split"] == "train":
            steps = line["step"] - last_step
            is_short = line["epoch"] == last_epoch and 4 * steps < last_steps
            last_step, last_steps, last_epoch = line["step"], steps, line["epoch"]
            if is_short:
                continue
        for name, value in line.items():
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
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

    kind = name.rpartition("_")[2]  # "ema_loss" is a "loss"
    last = "{:.2%}" if kind == "accuracy" else "{:.4g}"
    for split, colour in COLOURS.items():
        if split in splits:
            steps, values = zip(*splits[split], strict=True)
            marker = "o" if len(steps) < MARKERS_BELOW else None
            label = f"{split}, last {last.format(values[-1])}"
            axes.plot(steps, values, label=label, color=colour, marker=marker, markersize=4)
    axes.legend()
    axes.set(xlabel="step (optimizer steps)", ylabel=name)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    values = [value for points in splits.values() for _, value in points]
    # Over less than a factor of five, a logarithmic axis would have at most one label.
    if kind == "loss" and min(values) > 0 and max(values) >= 5 * min(values):
        axes.set_yscale("log")
        # Over many decades LogLocator labels every n-th power of ten, but with more `subs` nothing.
        subs = (1, 2, 5) if max(values) < 1000 * min(values) else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    if kind == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))


def plot_confusion(confusion: list[list[int]], classes: list[str], picture: Path) -> None:
    """Plot a confusion matrix of counts [true][predicted], coloured by the fraction of each true class.

    The counts are printed for up to 30 classes.
    """
    save_picture(picture, lambda: draw_confusion(confusion, classes, picture.parent.name))


def draw_confusion(confusion: list[list[int]], classes: list[str], run: str):
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    fractions = [[count / max(sum(counts), 1) for count in counts] for counts in confusion]
    side = min(12, 3 + 0.4 * len(classes))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    norm = PowerNorm(0.4, 0, 1)  # makes error rates of a few percent visible
    image = axes.imshow(fractions, cmap="Blues", norm=norm)
    figure.colorbar(image, label="fraction of the true class", shrink=0.8)
    correct = sum(counts[label] for label, counts in enumerate(confusion))
    total = sum(sum(counts) for counts in confusion)
    title = f"{run}\n{correct} of {total} correct, {correct / max(total, 1):.2%}"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    if len(classes) > 30:
        return figure
    names = [str(name)[:20] for name in classes]
    rotation = 90 if max(len(name) for name in names) > 2 else 0
    axes.set_xticks(range(len(names)), names, rotation=rotation)
    axes.set_yticks(range(len(names)), names)
    for row, counts in enumerate(confusion):
        for column, count in enumerate(counts):
            if count:
                colour = "white" if norm(fractions[row][column]) > 0.5 else "black"
                axes.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    return figure
