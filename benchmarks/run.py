"""Run the benchmarks one after another on this machine, and write RESULTS.md and results.png.

    python benchmarks/run.py                     # all of them
    python benchmarks/run.py mnist_epoch ddp     # these; the others keep the numbers that they have
    python benchmarks/run.py --draw              # measure nothing: draw results.json again

The results are those of one machine and its versions: on any other, the ones that are there are dropped. So are those
of a command that has changed. Each benchmark is a script of its own too, with its flags in --help, and prints its
tables. before.py, which compares with an earlier commit, is not among them.
"""

import argparse
import hashlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

# In the order in which they stand in RESULTS.md, with flags that make each of them fit into about two minutes.
BENCHMARKS = {
    "mnist_epoch": "",
    "startup": "--rounds 5",
    "accelerate_share": "",
    "ddp": "",
    "topologies": "--rounds 2",
    "checkpoint": "",
    "evaluation": "",
    "memory": "",
    "resnet50": "--rounds 2",
    "gradient_accumulation": "--memory_steps 1 8",
    "model_split": "speed --microbatches 1 4 8",
    "transformer": "",
    "transformer_memory": "",
    "compressors": "",
    "virtual_processes": "--rounds 4 --steps 4",
    "elastic": "",
}
INTRODUCTION = """\
# Results

Written by `python benchmarks/run.py`, with the picture, from [results.json](results.json); run it on your machine. The
ways that are compared took turns, and a ratio is that of their medians: the speed of a shared machine drifts by more
than they differ.

![each way beside the others, and the goals](results.png)"""
HERE = Path(__file__).parent
# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, GREY, RED = ("#0072B2", "#9A9A9A", "#D55E00")
PARTS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#CC79A7", "#004D6E", "#9A9A9A", "#D55E00")
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    common.check_names(parser, "benchmark", args.names, BENCHMARKS)
    return args


def command(name: str) -> str:
    return f"python benchmarks/{name}.py {BENCHMARKS[name]}".strip()


def measure(name: str) -> dict:
    """The entry of a benchmark in results.json."""
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder) / "out.json", time.perf_counter()
        if subprocess.run([sys.executable, *command(name).split()[1:], "--json", out], cwd=common.ROOT).returncode:
            sys.exit(f"error: {command(name)} failed; results of others are kept")
        seconds, measured = round(time.perf_counter() - began), json.loads(out.read_text())
    return {"command": command(name), **common.machine(), "seconds": seconds, "measured": measured}


def merge(old: dict, name: str, new: dict) -> dict:
    """`old` with a new entry, in the order of BENCHMARKS and without the entries that do not belong beside it."""
    kept = {
        other: entry
        for other, entry in old.items()
        if other in BENCHMARKS
        and entry["command"] == command(other)
        and all(entry[fact] == new[fact] for fact in ("device", "versions"))
    }
    kept[name] = new
    return {other: kept[other] for other in BENCHMARKS if other in kept}


def report(name: str, entry: dict) -> common.Report:
    return importlib.import_module(f"benchmarks.{name}").report(entry["measured"])


def goals(results: dict) -> str:
    columns = {"goal": "{}", "limit": "{}", "measured": "{}", "met": "{}"}
    rows = [
        [
            goal.what,
            f"at {'least' if goal.at_least else 'most'} {goal.format.format(goal.limit)}",
            goal.format.format(goal.measured),
            "yes" if goal.is_met() else "**no**",
        ]
        for name, entry in results.items()
        for goal in report(name, entry).goals
    ]
    return common.table(columns, rows)


def render(results: dict) -> str:
    """RESULTS.md. It has a heading for each benchmark, also without results, so that links keep working."""
    newest = max(results.values(), key=lambda entry: entry["date"])
    text = [INTRODUCTION, f"All on {newest['device']}; {newest['versions']}.", "## Goals", goals(results)]
    for name in BENCHMARKS:
        heading, _, body = importlib.import_module(f"benchmarks.{name}").__doc__.partition("\n\n")
        body = re.sub(r"^(    .*\n)+", f"    {command(name)}\n", body, count=1, flags=re.M).strip("\n")
        text += [f"## {heading.rstrip('.')}", body]
        if name in results:
            entry = results[name]
            text += [f"{entry['date']}, in {entry['seconds']} s.", *report(name, entry).tables]
        else:
            text.append("Not measured on this machine yet.")
    return "\n\n".join(text) + "\n"


def digest(results: dict) -> str:
    """Says in the picture which results it shows."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def draw(results: dict, picture: Path) -> None:
    """A PNG with one group of bars beside the other."""
    from matplotlib.figure import Figure

    def height(column):
        return sum(len(bars.values) + (4 if bars.is_stacked() else 2) for bars in column)

    columns = [[], []]
    for name, entry in results.items():
        for bars in report(name, entry).bars:
            min(columns, key=height).append(bars)
    columns = [column for column in columns if column]
    figure = Figure(figsize=(12, 1 + 0.32 * max(map(height, columns))), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)
    title = "Blue: the scripts here. Grey: what you would write instead. Colours: where the time goes."
    figure.suptitle(title, fontsize=10)
    for subfigure, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        heights = [height([bars]) for bars in column]
        rows = subfigure.subplots(len(column), 1, height_ratios=heights, squeeze=False)
        for axes, bars in zip(rows[:, 0], column, strict=True):
            draw_bars(axes, bars)
    figure.savefig(picture, dpi=100, metadata={"Description": digest(results)})


def draw_bars(axes, bars: common.Bars) -> None:
    values, rows = list(bars.values.values()), range(len(bars.values))
    wholes = [0.0] * len(values)
    if bars.is_stacked():
        parts = list(dict.fromkeys(part for value in values for part in value))
        for part, color in zip(parts, PARTS[: len(parts)], strict=True):
            lengths = [value.get(part, 0.0) for value in values]
            axes.barh(rows, lengths, left=wholes, color=color, height=0.7, label=part)
            wholes = [whole + length for whole, length in zip(wholes, lengths, strict=True)]
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.3, -0.12), ncols=4, frameon=False)
    else:
        wholes = values
        axes.barh(rows, values, color=[BLUE if row < bars.ours else GREY for row in rows], height=0.7)
    for row, whole in enumerate(wholes):
        text = bars.format.format(whole)
        axes.annotate(text, (whole, row), (4, 0), textcoords="offset points", va="center", fontsize=9, bbox=BEHIND)
    axes.set_yticks(rows, bars.values, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(*wholes, bars.goal or 0))
    axes.set_title(bars.title, fontsize=9, loc="left", fontweight="bold")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if bars.goal:
        axes.axvline(bars.goal, color=RED, linestyle="--", linewidth=1.5)
        axes.set_title(f"goal {'≥' if bars.at_least else '≤'} {bars.goal:g}", fontsize=9, loc="right", color=RED)


def write(results: dict) -> None:
    text = re.sub(r"\[[^][{}]+\]", lambda row: " ".join(row[0].split()), json.dumps(results, indent=1))
    (HERE / "results.json").write_text(text + "\n")
    (HERE / "RESULTS.md").write_text(render(results))
    draw(results, HERE / "results.png")


def main():
    args = parse_args()
    file = HERE / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in [] if args.draw else args.names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        results = merge(results, name, measure(name))
        write(results)  # at once: the next one may fail
    if args.draw:
        write(results)


if __name__ == "__main__":
    main()
