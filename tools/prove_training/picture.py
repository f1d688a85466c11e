"""A picture of which process read which sample in which step, with what is twice or missing in red."""

import collections
import sys
import textwrap
from pathlib import Path

from .stages import parts_of, passes_of
from .text import show

RANKS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
STYLES = {  # of what stands over the ranks: a ring around what is there, a cross where nothing is
    "twice": {"marker": "o", "s": 50, "facecolors": "none", "edgecolors": "red"},
    "missing": {"marker": "x", "s": 40, "color": "red"},
    "repeated to fill the last step": {"marker": "s", "s": 14, "color": "grey"},
}


def reads(record: dict) -> list[tuple[int, tuple[str, int], str]]:
    """The step, the pass and the sample of all that a process read; a pass is a loader and a number."""
    parts = [(number, part) for number, step in enumerate(record["steps"], 1) for part in parts_of(step) if part["key"]]
    return [(number, (part["key"], part["pass"]), each) for number, part in parts for each in part["digests"] or []]


def marks(reference: dict, ranks: list[dict]) -> dict[str, list[tuple[int, int]]]:
    """The (step, sample) of each mark by its name; samples are numbered by their first use on one process."""
    places, found, order = collections.defaultdict(list), collections.defaultdict(list), {}
    for record in (reference, *ranks):
        for _, _, sample in reads(record):
            order.setdefault(sample, len(order))
    for rank, record in enumerate(ranks):
        found[f"rank {rank}"] = [(step, order[sample]) for step, _, sample in reads(record)]
        for step, key, sample in reads(record):
            places[key, sample].append(step)
    last = {key: max(max(steps) for (of, _), steps in places.items() if of == key) for key, _ in places}
    wanted = {key: collections.Counter(samples) for key, samples in passes_of(reference).items()}
    for (key, sample), steps in places.items():
        for step in sorted(steps)[max(wanted[key][sample], 1) :] if key in wanted else []:
            name = "repeated to fill the last step" if step == last[key] else "twice"
            found[name].append((step, order[sample]))
    found["missing"] = [
        (step, order[sample]) for step, key, sample in reads(reference) if key in last and (key, sample) not in places
    ]
    return {name: points for name, points in found.items() if points}


def draw(runs: list[tuple[dict, list[dict]]], verdict: str):
    """A Figure with a panel for each number of processes; None where no samples were recorded."""
    from matplotlib.figure import Figure

    panels = [(len(ranks), marks(reference, ranks)) for reference, ranks in runs]
    panels = [(processes, found) for processes, found in panels if found]
    if not panels:
        return None
    figure = Figure(figsize=(max(6 * len(panels), 8), 6), dpi=100, layout="constrained")
    for axes, (processes, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, (name, points) in enumerate(sorted(found.items(), key=lambda each: each[0] in STYLES)):
            style = STYLES.get(name, {"marker": "s", "s": 14, "color": RANKS[number % len(RANKS)]})
            axes.scatter(*zip(*points, strict=True), label=name, **style)
        axes.set(title=f"{processes} processes", xlabel="optimizer step", ylabel="sample, by first use on 1 process")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    figure.suptitle(textwrap.fill(verdict, 90))
    return figure


def save(file: Path, runs: list, verdict: str) -> None:
    """Write the picture, or print why there is none."""
    try:
        if (figure := draw(runs, verdict)) is None:
            return show("no picture: no samples of several processes were recorded", "yellow", file=sys.stderr)
        figure.savefig(file)
    except Exception as error:
        show(f"warning: no picture: {type(error).__name__}: {str(error).splitlines()[:1]}", "yellow", file=sys.stderr)
