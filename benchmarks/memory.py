"""Memory of MNIST.

    python benchmarks/memory.py

scripts/mnist_mlp.py with its default settings, but for 20 epochs, on one process and on two: the
peak memory of a process from its start to its end, libraries included; and its resident set size
after an epoch, of the process that grew most.
"""

import json
import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.memory import own_peak_memory_gib

CONFIGS = ("cpu", "cpu_ddp")


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--num_epochs", type=int, default=20, help="default: 20")
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
    flags = f"--flags={args.flags} --num_epochs {args.num_epochs}"
    return {config: common.launch_workers(config, __file__, flags) for config in CONFIGS}


def report(measured) -> common.Report:
    columns = {"config": "{}", "peak of a process, GiB": "{:.2f}", "epochs": "{}"}
    columns |= {"held after epoch 3, MiB": "{:.0f}", "after the last one": "{:.0f}"}
    columns["grown by, MiB"] = "{:+.1f}"
    rows, peaks, goals = [], {}, []
    for config, processes in measured.items():
        peak = peaks[config] = max(each["peak_gib"] for each in processes)
        histories = [each["resident_mib"] for each in processes]
        resident = max(histories, key=lambda each: each[-1] - each[2])
        epochs, growth = len(resident), resident[-1] - resident[2]
        rows.append([f"{config}.yaml", peak, epochs, resident[2], resident[-1], growth])
        what = f"MNIST, peak memory of a process, {config}.yaml"
        goals.append(common.Goal(what, peak, 1.2, "{:.2f} GiB"))
        what = f"its growth over {epochs} epochs, from the third on"
        goals.append(common.Goal(what, growth, 10, "{:.1f} MiB"))
    bars = common.Bars("MNIST, peak GiB of a process", peaks, goal=1.2, ours=len(peaks))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
