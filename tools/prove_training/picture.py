"""A picture of which process read which sample in which step, with what is twice or missing in red."""

import collections
import sys
import textwrap
from pathlib import Path

from .stages import largest_step, parts_of, passes_of
from .text import show

RANKS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
PADDING = "repeated to fill the last step"
STYLES = {  # of what stands over the ranks: a ring around what is there, a cross where nothing is
    "twice": {"marker": "o", "s": 50, "facecolors": "none", "edgecolors": "red"},
    "missing": {"marker": "x", "s": 40, "color": "red"},
    PADDING: {"marker": "s", "s": 14, "color": "grey"},
}


def reads(record: dict):
    """Yield (pass, step, sample) for each sample that a process read; a pass is a loader and a number."""
    for number, step in enumerate(record["steps"], start=1):
        for part in parts_of(step):
            if part["key"] is not None:
                for digest in part["digests"] or []:
                    yield (part["key"], part["pass"]), number, digest


def marks(reference: dict, ranks: list[dict]) -> dict[str, list[tuple[int, int]]]:
    """The (step, sample) of each mark by its name; samples are numbered by their first use on one process."""
    order, found = {}, collections.defaultdict(list)
    for record in (reference, *ranks):
        for _, _, digest in reads(record):
            order.setdefault(digest, len(order))
    wanted = {key: collections.Counter(digests) for key, digests in passes_of(reference).items()}
    batch = largest_step(reference)
    seen = collections.defaultdict(collections.Counter)
    by_step = sorted(
        ((step, rank, key, digest) for rank, each in enumerate(ranks) for key, step, digest in reads(each))
    )
    for _, _, key, digest in by_step:
        seen[key][digest] += 1
    last = {key: step for step, _, key, _ in by_step}
    counted = collections.defaultdict(collections.Counter)
    for step, rank, key, digest in by_step:
        counted[key][digest] += 1
        found[f"rank {rank}"].append((step, order[digest]))
        if key in wanted and counted[key][digest] > max(wanted[key][digest], 1):
            is_padding = step == last[key] and (seen[key] - wanted[key]).total() <= batch
            found[PADDING if is_padding else "twice"].append((step, order[digest]))
    for key, step, digest in reads(reference):
        if key in seen and not seen[key][digest]:
            found["missing"].append((step, order[digest]))
    return dict(found)


def draw(runs: list[tuple[dict, list[dict]]], verdict: str):
    """A Figure with a panel for each number of processes; None where no samples were recorded."""
    from matplotlib.figure import Figure

    panels = [(len(ranks), marks(reference, ranks)) for reference, ranks in runs]
    panels = [(processes, found) for processes, found in panels if found]
    if not panels:
        return None
    figure = Figure(figsize=(max(6 * len(panels), 8), 6), dpi=100, layout="constrained")
    for axes, (processes, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in sorted(found, key=lambda name: (name in STYLES, name)):
            style = STYLES.get(name)
            if style is None:
                style = {"marker": "s", "s": 14, "color": RANKS[int(name.removeprefix("rank ")) % len(RANKS)]}
            axes.scatter(*zip(*found[name], strict=True), label=name, **style)
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
