"""One loss curve on 1, 2 and 3 processes.

    python benchmarks/same_curve.py

scripts/mnist_mlp.py with its defaults, in float32, on one process with accelerate_configs/cpu.yaml and on 2 and 3 with
cpu_ddp.yaml. Differences are between the losses logged every 5 steps, relative to the loss of one process.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

PICTURE = common.ROOT / "guides" / "same_curve.png"
CONFIGS = {1: "cpu", 2: "cpu_ddp", 3: "cpu_ddp"}


def parse_args():
    parser = common.make_parser(__doc__, dataset=True)
    parser.add_argument("--num_epochs", type=common.positive_int, default=4, help="of each run (%(default)s)")
    return parser.parse_args()


def measure(args) -> dict:
    """By the number of processes: steps, losses and final test accuracy."""
    flags = ["--dataset", args.dataset, "--num_epochs", args.num_epochs, "--log_every", 5]
    measured = {}
    for processes, config in CONFIGS.items():
        print(f"{processes} processes", file=sys.stderr, flush=True)
        launch_flags = ["--num_processes", processes]
        summary, lines = common.launch_script(config, "mnist_mlp", *flags, launch_flags=launch_flags)
        train = [line for line in lines if line["split"] == "train"]
        measured[processes] = {
            "steps": [line["step"] for line in train],
            "losses": [line["loss"] for line in train],
            "test_accuracy": summary["test_accuracy"],
        }
    return measured


def differences(measured) -> dict[str, list[float]]:
    """Of each logged loss, relative to one process."""
    expected = measured["1"]["losses"]
    return {
        processes: [abs(loss - base) / base for loss, base in zip(run["losses"], expected, strict=True)]
        for processes, run in measured.items()
    }


def report(measured) -> list[str]:
    columns = {"processes": "{}", "losses": "{}", "largest relative difference": "{:.1e}", "test accuracy": "{:.2%}"}
    rows = [
        [processes, len(by_step), max(by_step), measured[processes]["test_accuracy"]]
        for processes, by_step in differences(measured).items()
    ]
    return [common.table(columns, rows)]


def draw(measured, device: str) -> Figure:
    """The curves above, and below them what they differ by."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for (processes, run), style in zip(measured.items(), ("C0-", "C1--", "k:"), strict=True):
        label = "1 process" if processes == "1" else f"{processes} processes"
        above.semilogy(run["steps"], run["losses"], style, label=label)
    for processes, color in (("2", "C1"), ("3", "k")):
        steps, by_step = measured[processes]["steps"], differences(measured)[processes]
        below.semilogy(steps, by_step, color, marker=".", linestyle="", markersize=4, label=f"{processes} processes")
    above.set_title(f"mnist_mlp.py, batch 256, float32; {device}", fontsize=10, loc="left")
    above.set_ylabel("training loss")
    above.legend()
    below.set_ylim(1e-10, 1e-5)
    below.set_ylabel("relative difference\nto 1 process")
    below.set_xlabel("step")
    below.legend(loc="upper left", ncols=2, fontsize=8)
    below.grid(axis="y", alpha=0.3)
    return figure


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
