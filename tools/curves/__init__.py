"""Draw the train and test metrics of a run over its steps, or those of several runs in one picture.

    python tools/curves runs/a
    python tools/curves runs/a runs/b --output a_and_b.png

There is a panel for each of the first six metrics. The picture of one run is curves.png in its folder; that of several
runs is curves.png in the current folder, and names each run as its folder. An earlier picture of that name is replaced.
Runs may still be going on. The exit code is 2 if there is nothing to draw.
"""

import argparse
import math
from pathlib import Path

from tools.compare import Run, read_runs
from utils.atomic_files import write_atomically
from utils.console import plural, show, stop

# Okabe and Ito's, which colour-blind readers can tell apart: of the runs, or of the splits of a single run.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
SPLITS = {"train": "-", "test": "--"}  # with their lines, where colours are those of runs
MAX_PANELS = 6
MAX_COLUMNS = 3
MARKERS_BELOW = 30  # curves with fewer points show each one


def read_curves(run: Run) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """{metric: {split: [(step, value), ...]}}, with finite values only, and without learning rates."""
    curves = {}
    for row in run.numbers.itertuples():
        is_drawn = row.split in SPLITS and row.metric != "samples" and not row.metric.endswith("lr")
        if is_drawn and math.isfinite(row.value):
            curves.setdefault(row.metric, {}).setdefault(row.split, []).append((row.step, row.value))
    return curves


def draw(runs: dict[str, dict], title: str = ""):
    """Draw a panel for each of the first metrics.

    Args:
        runs: the results of `read_curves` by the names of the runs. The splits of a single run differ in colour.

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    metrics = list(dict.fromkeys(metric for curves in runs.values() for metric in curves))[:MAX_PANELS]
    columns = min(len(metrics), MAX_COLUMNS)
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(5 * columns, 4.2 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, metric in zip(panels, metrics, strict=False):
        draw_panel(axes, metric, [curves.get(metric, {}) for curves in runs.values()])
    for axes in panels[len(metrics) :]:
        axes.remove()
    if len(runs) > 1:
        handles = [Line2D([], [], color=colour, label=name) for name, colour in zip(runs, COLOURS, strict=False)]
        handles += [Line2D([], [], color="grey", linestyle=style, label=split) for split, style in SPLITS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    figure.suptitle(title)
    return figure


def draw_panel(axes, metric: str, runs: list[dict[str, list[tuple[int, float]]]]) -> None:
    """Draw a metric, given as {split: [(step, value), ...]} of each run."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    kind = metric.rpartition("_")[2]  # "ema_loss" is a "loss"
    last = "{:.2%}" if kind == "accuracy" else "{:.4g}"
    is_alone = len(runs) == 1
    every = []
    for run_colour, splits in zip(COLOURS, runs, strict=False):
        for (split, style), split_colour in zip(SPLITS.items(), COLOURS, strict=False):
            if split not in splits:
                continue
            steps, values = zip(*splits[split], strict=True)
            axes.plot(
                steps,
                values,
                color=split_colour if is_alone else run_colour,
                linestyle="-" if is_alone else style,
                label=f"{split}, last {last.format(values[-1])}",
                marker="o" if len(steps) < MARKERS_BELOW else None,
                markersize=4,
            )
            every += values
    if is_alone:
        axes.legend()
    axes.set(xlabel="step (optimizer steps)", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    # Over less than a factor of five, a logarithmic axis would have at most one label.
    if kind == "loss" and min(every) > 0 and max(every) >= 5 * min(every):
        axes.set_yscale("log")
    if kind == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser("curves", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=f"folder of a run, at most {len(COLOURS)}")
    where = "default: curves.png, in the folder of the run, or of several runs in the current one"
    parser.add_argument("--output", type=Path, metavar="FILE.png", help=f"the picture, which is replaced ({where})")
    args = parser.parse_args()
    if len(args.runs) > len(COLOURS):
        stop(f"{len(args.runs)} runs in one picture cannot be told apart: name at most {len(COLOURS)}")
    picture = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / "curves.png"
    if picture.suffix != ".png":
        stop(f"--output {picture} does not end with .png")
    runs = read_runs(args.runs)
    curves = {run.name: read_curves(run) for run in runs}
    for run in runs:
        if not curves[run.name]:
            stop(f"{run.folder} has no metrics to draw: a run writes them to metrics.jsonl at its first log line")
    title = f"{runs[0].name}: {plural(runs[0].step, 'step')}" if len(runs) == 1 else ""
    try:
        figure = draw(curves, title)
        write_atomically(picture, lambda part: figure.savefig(part, dpi=120, bbox_inches="tight"))
    except ModuleNotFoundError as error:
        stop(f"drawing needs {error.name}: pip install -r scripts/requirements.txt")
    except OSError as error:
        stop(f"{picture} cannot be written: {error.strerror or error}")
    show(f"drawn: {picture}")
    return 0
