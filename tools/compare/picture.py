"""The curves of several runs and, below each metric, its relative difference from the first run."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

STYLES = {"train": "-", "test": "--"}
NOT_DRAWN = ("samples", "lr")


def draw(names: list[str], numbers: list[pd.DataFrame], tolerance: float, picture: Path) -> None:
    """Write a PNG with two panels per metric.

    Args:
        names, numbers: one entry per run, the reference first; `numbers` as from `read_numbers`.
        tolerance: drawn as a line in the lower panels.
    """
    metrics = [metric for metric in pd.concat(numbers)["metric"].unique() if metric not in NOT_DRAWN]
    figure = Figure(figsize=(5 * max(len(metrics), 1), 6), dpi=120, layout="constrained")
    panels = figure.subplots(2, max(len(metrics), 1), squeeze=False, sharex=True, height_ratios=[2, 1])
    for (above, below), metric in zip(panels.T, metrics, strict=False):
        above.set(ylabel=metric)
        below.set(xlabel="step", ylabel="relative difference")
        below.set_yscale("symlog", linthresh=1e-17)  # a logarithmic axis with a zero
        below.set_yticks([0, 1e-16, 1e-12, 1e-8, 1e-4, 1], ["0", "1e-16", "1e-12", "1e-8", "1e-4", "1"])
        below.axhline(tolerance, color="grey", linestyle=":", label=f"tolerance {tolerance:g}")
        for split, style in STYLES.items():
            curves = []
            for table in numbers:
                lines = table[(table["metric"] == metric) & (table["split"] == split) & (table["nth"] == 0)]
                curves.append(lines.set_index("step")["value"])
            for index, (name, curve) in enumerate(zip(names, curves, strict=True)):
                # The reference is wide and pale, so that an equal curve is visible on top of it.
                look = {"color": f"C{index}", "linestyle": style, "marker": "." if len(curve) < 30 else None}
                look |= {"linewidth": 4, "alpha": 0.4} if index == 0 else {}
                above.plot(curve.index, curve, label=f"{name}, {split}", **look)
                if index:
                    difference = (curve - curves[0]).abs() / pd.concat([curve.abs(), curves[0].abs()], axis=1).max(
                        axis=1
                    )
                    below.plot(difference.index, difference, **look)
        above.legend()
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    figure.savefig(picture)
