"""Memory of MNIST.

    python benchmarks/memory.py

scripts/mnist_mlp.py with its default settings, on one process and on two: what a process takes at most from its start
to its end, libraries included; and what it holds after an epoch of a longer run (resident set size, of the process that
grew most).
"""

import json
import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.memory import own_peak_memory_gib

CONFIGS = {"cpu": 1, "cpu_ddp": 2}


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--num_epochs", type=int, default=20, help="of the longer run (default: 20)")
    parser.add_argument("--worker", help="for the processes that it launches: where to write")
    parser.add_argument("--flags", default="", help="for the script")
    return parser.parse_args()


def worker(args) -> None:
    """A run of the script, with the memory noted at the end of each epoch."""
    from accelerate.utils import gather_object

    from scripts import mnist_mlp

    resident, evaluate = [], mnist_mlp.evaluate

    def watched(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        resident.append(psutil.Process().memory_info().rss / 2**20)
        return result

    mnist_mlp.evaluate = watched
    summary, _ = common.run_script("mnist_mlp", *args.flags.split())
    mine = {"peak_gib": own_peak_memory_gib(torch.device("cpu")), "resident_mib": resident}
    everyone = gather_object([mine])
    if summary:
        Path(args.worker).write_text(json.dumps(everyone))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(args) -> dict:
    measured = {}
    for config in CONFIGS:
        runs = {"default": args.flags, "long": f"{args.flags} --num_epochs {args.num_epochs}"}
        measured[config] = {
            name: common.launch_workers(config, __file__, f"--flags={flags}") for name, flags in runs.items()
        }
    return measured


def report(measured) -> common.Report:
    columns = {"config": "{}", "peak of a process, default run, GiB": "{:.2f}", "epochs of the longer run": "{}"}
    columns |= {"its peak, GiB": "{:.2f}", "held after epoch 3, MiB": "{:.0f}", "after the last one": "{:.0f}"}
    columns["grown by, MiB"] = "{:+.1f}"
    rows, bars, goals = [], {}, []
    for config, runs in measured.items():
        peak = bars[config] = max(each["peak_gib"] for each in runs["default"])
        resident = max((each["resident_mib"] for each in runs["long"]), key=lambda each: each[-1] - each[2])
        growth = resident[-1] - resident[2]
        row = [f"{config}.yaml", peak, len(resident), max(each["peak_gib"] for each in runs["long"])]
        rows.append([*row, resident[2], resident[-1], growth])
        goals.append(common.Goal(f"MNIST, peak memory of a process, {config}.yaml", peak, 1.2, "{:.2f} GiB"))
        goals.append(
            common.Goal(f"its growth over {len(resident)} epochs, from the third on", growth, 10, "{:.1f} MiB")
        )
    return common.Report(
        [common.table(columns, rows)], [common.Bars("MNIST, peak GiB of a process", bars, goal=1.2, ours=2)], goals
    )


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
