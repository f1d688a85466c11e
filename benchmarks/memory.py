"""Memory of MNIST.

    python benchmarks/memory.py

scripts/mnist_mlp.py with its default settings, but for 20 epochs, on one process and on two: the peak memory of a
process from its start to its end, libraries included; and its resident set size after an epoch, for the process that
grew most.
"""

import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.extras.peak_memory import own_peak_memory_gib


def parse_args():
    parser = common.make_parser(__doc__, dataset=True, worker=True)
    parser.add_argument("--num_epochs", type=common.positive_int, default=20, help="3 or more (%(default)s)")
    return parser.parse_args()


def worker(args) -> None:
    """A run of the script that notes the memory after each test."""
    from accelerate.utils import gather_object

    from scripts import mnist_mlp

    resident, evaluate = [], mnist_mlp.evaluate

    def watched(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        resident.append(psutil.Process().memory_info().rss / 2**20)
        return result

    mnist_mlp.evaluate = watched
    common.run_script("mnist_mlp", "--dataset", args.dataset, "--num_epochs", args.num_epochs)
    mine = {"peak_gib": own_peak_memory_gib(torch.device("cpu")), "resident_mib": resident}
    common.finish_worker(args.worker, gather_object([mine]))


def measure(args) -> dict:
    flags = ["--dataset", args.dataset, "--num_epochs", args.num_epochs]
    return {config: common.launch_workers(config, __file__, *flags) for config in ("cpu", "cpu_ddp")}


def report(measured) -> common.Report:
    columns = {"config": "{}", "peak of a process, GiB": "{:.2f}", "epochs": "{}"}
    columns |= {"held after epoch 3, MiB": "{:.0f}", "after the last one": "{:.0f}", "grown by, MiB": "{:+.1f}"}
    rows, peaks, goals = [], {}, []
    for config, processes in measured.items():
        peak = peaks[config] = max(each["peak_gib"] for each in processes)
        resident = max((each["resident_mib"] for each in processes), key=lambda mib: mib[-1] - mib[2])
        epochs, growth = len(resident), resident[-1] - resident[2]
        rows.append([f"{config}.yaml", peak, epochs, resident[2], resident[-1], growth])
        goals.append(common.Goal(f"MNIST, peak memory of a process, {config}.yaml", peak, 1.2, "{:.2f} GiB"))
        goals.append(common.Goal(f"its growth over {epochs} epochs, from the third on", growth, 10, "{:.1f} MiB"))
    bars = common.Bars("MNIST, peak GiB of a process", peaks, goal=1.2, ours=len(peaks))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
