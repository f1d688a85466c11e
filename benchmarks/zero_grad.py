"""`.grad` and the weight, with and without zero_grad.

    python benchmarks/zero_grad.py

A model of one weight w learns y = 3 x by SGD from w = 0: four micro-batches, two per step, in float64. `backward()`
adds to `.grad`, which is what accumulation needs within a step. Without `optimizer.zero_grad()` after the step, the
gradient of the first step is in the second one, too.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

PICTURE = common.ROOT / "guides" / "zero_grad.png"
MICRO_BATCHES = [1.0, 2.0, 1.5, 1.0]  # the x of each; y is three times as much
PER_STEP, LR = 2, 0.1
WAYS = {"zeroed after each step": True, "never zeroed": False}


def parse_args():
    return common.make_parser(__doc__).parse_args()


def train(zeroes: bool) -> list[list]:
    """After each call that changes something: its name, w.grad and w."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer, rows = torch.optim.SGD([w], LR), []
    for number, x in enumerate(MICRO_BATCHES, 1):
        loss = (w * x - 3 * x) ** 2 / PER_STEP
        calls = {f"backward {number}": loss.backward}
        if number % PER_STEP == 0:
            calls |= {"step": optimizer.step} | ({"zero_grad": optimizer.zero_grad} if zeroes else {})
        for name, call in calls.items():
            call()
            rows.append([name, 0.0 if w.grad is None else w.grad.item(), w.item()])
    return rows


def measure(args) -> dict[str, list]:
    return {way: train(zeroes) for way, zeroes in WAYS.items()}


def report(measured) -> list[str]:
    columns = {"way": "{}", "after": "{}", "w.grad": "{:.2f}", "w": "{:.3f}"}
    return [common.table(columns, [[way, *row] for way, rows in measured.items() for row in rows])]


def draw(measured, device: str) -> Figure:
    """Two panels per way: w.grad above and w below, after each call."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(2, len(measured), sharey="row", sharex="col")
    for (way, rows), (above, below) in zip(measured.items(), panels.T, strict=True):
        calls, gradients, weights = zip(*rows, strict=True)
        places = range(len(calls))
        colours = ["#0072b2" if call.startswith("backward") else "#bbbbbb" for call in calls]
        above.bar_label(above.bar(places, gradients, color=colours), fmt="%.1f", fontsize=8)
        below.step([-1, *places], [0.0, *weights], where="post", color="#d55e00")
        below.plot(places, weights, "o", color="#d55e00")
        below.axhline(3, color="grey", linestyle=":", linewidth=1)
        above.axhline(0, color="black", linewidth=0.8)
        above.set_title(f".grad {way}", fontsize=10)
        below.set_xticks(places, calls, rotation=45, ha="right")
    lowest = min(gradient for rows in measured.values() for _, gradient, _ in rows)
    panels[0, 0].set(ylabel="w.grad", ylim=(1.15 * lowest, -0.15 * lowest))
    panels[1, 0].set_ylabel("w (dotted: right)")
    return figure


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
