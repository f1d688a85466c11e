"""curves.png: the metrics of a run over its steps.

A picture that cannot be drawn or written is a warning and never the end of a run: the numbers are in a file already.
matplotlib is imported only when a picture is drawn. `Figure` is used instead of pyplot, which would choose a window
system and keep every figure.
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
MARKERS_BELOW = 30  # points: a line with fewer shows each one


def save_picture(picture: Path, draw: Callable) -> None:
    """Call `draw()`, which returns a matplotlib Figure or None, and write the figure as a PNG.

    An error is shown as a warning. It can be of any type: matplotlib is not installed, cannot draw
    these values, or the disk is full.
    """
    try:
        import matplotlib.figure  # noqa: F401  `draw` needs it
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = draw()
        if figure is not None:
            figure.set_dpi(120)
            # savefig would draw the figure twice, the first time for options that are not used.
            write_atomically(picture, FigureCanvasAgg(figure).print_png)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        show(f"warning: {picture} is missing, it cannot be drawn or written: {reason}", "yellow")


def plot_curves(metrics_file: Path, picture: Path, title: str = "") -> None:
    """Plot the metrics in metrics.jsonl over the steps: one panel per metric, train and test in each.

    The first six metrics are plotted, without learning rates and timings. Without any metric there is no picture.
    """
    save_picture(picture, lambda: draw_curves(read_curves(metrics_file), title))


def read_curves(metrics_file: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Read metrics.jsonl as {metric: {split: [(step, value), ...]}}, with finite values only.

    A training line is a mean since the line before it. What is left at the end of an epoch may be a few steps, whose
    mean is noise and would be drawn as a cliff: a line of less than a quarter of the steps of the line before it, in
    the same epoch, is left out.
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
    """Draw `read_curves`' result; returns a Figure, or None if there is nothing to draw."""
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
    """Draw one metric into a panel, a line for each split."""
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
    # A smaller range than a factor of five would leave a logarithmic axis with one label or none.
    if kind == "loss" and min(values) > 0 and max(values) >= 5 * min(values):
        axes.set_yscale("log")
        # Over many decades LogLocator labels every n-th power of ten, and with more `subs` nothing.
        subs = (1, 2, 5) if max(values) < 1000 * min(values) else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    if kind == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))


def plot_confusion(confusion: list[list[int]], classes: list[str], picture: Path) -> None:
    """Plot a confusion matrix, coloured by the fraction of each true class.

    confusion: counts by [true class][predicted class]. They are printed for up to 30 classes.
    """
    save_picture(picture, lambda: draw_confusion(confusion, classes, picture.parent.name))


def draw_confusion(confusion: list[list[int]], classes: list[str], run: str):
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    fractions = [[count / max(sum(counts), 1) for count in counts] for counts in confusion]
    side = min(12, 3 + 0.4 * len(classes))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    norm = PowerNorm(0.4, 0, 1)  # an error rate of a few percent can still be seen
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


def draw_images(images: list, titles: list[str], picture: Path):
    from matplotlib.figure import Figure

    if not images:
        return None
    columns = 6
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(2 * columns, 2.3 * rows), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, image, title in zip(figure.axes, images, titles, strict=False):
        axes.imshow(image)
        axes.set_title(title, fontsize=8)
    figure.suptitle(f"{picture.parent.name}: {picture.stem.replace('_', ' ')}")
    return figure
