"""The same MNIST on every topology that this machine has.

    python benchmarks/topologies.py

scripts/mnist_mlp.py with its defaults, started by `accelerate launch` with each config that fits the machine: on a CPU
as one process, and as 2 and 4 with DistributedDataParallel; on one GPU; on all GPUs with DataParallel,
DistributedDataParallel and FSDP. "s per epoch" is the training loop without the checkpoints; "s in all" is from the
command to its end, with the start and the tests. The difference is the largest one of a final weight to the first row,
relative to the largest weight of its tensor. A model this small keeps no GPU busy, and in several processes
communication takes most of the time: the table shows that the numbers stay, not what a topology is good for.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

SCRIPT = common.ROOT / "scripts" / "mnist_mlp.py"
LIMIT = 1e-4  # of a difference: rounding in float32, after 940 steps


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, dataset=True)
    parser.add_argument("--num_epochs", type=common.positive_int, default=4, help="of each run (%(default)s)")
    return parser.parse_args()


def ways() -> dict[str, tuple[str, list]]:
    """The configs that fit this machine, by name: the config file and the launcher's flags."""
    found = {"cpu": ("cpu", [])}
    for processes in (2, 4):
        found[f"cpu_ddp x {processes}"] = ("cpu_ddp", ["--num_processes", processes])
    if torch.accelerator.is_available():
        found["single_gpu"] = ("single_gpu", [])
    if torch.cuda.device_count() > 1:
        found |= {config: (config, []) for config in ("dp", "ddp", "fsdp")}
    return found


def train(config: str, launch_flags: list, flags: list, folder: Path) -> dict:
    """Train once in a new folder inside `folder`; what its row says."""
    run = folder / f"{len(list(folder.iterdir()))}"
    began = time.perf_counter()
    common.launch(config, SCRIPT, *flags, "--output_dir", run, launch_flags=launch_flags)
    seconds = time.perf_counter() - began
    summary = json.loads((run / "summary.json").read_text())
    record = json.loads((run / "run.json").read_text())
    (launch,) = record["launches"]
    return {
        "folder": run.name,
        "seconds": seconds,
        "loop_s": common.training_s(summary),
        "images": record["data"]["train"],
        "accuracy": summary["test_accuracy"],
        "processes": launch["num_processes"],
        "device": launch["processes"][0]["device_name"] or launch["processes"][0]["device"],
        "replicas": launch["data_parallel_gpus"],
    }


def measure(args) -> dict:
    flags = ["--num_epochs", args.num_epochs, "--dataset", args.dataset]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns = {
            way: lambda config=config, own=own: train(config, own, flags, folder)
            for way, (config, own) in ways().items()
        }
        measured = common.take_turns(turns, args.rounds)
        first = folder / next(iter(measured.values()))[0]["folder"]
        for runs in measured.values():
            for run in runs:
                run["difference"] = common.largest_difference(folder / run.pop("folder"), first)
    return {"epochs": args.num_epochs, "runs": measured}


def report(measured) -> common.Report:
    columns = {"config": "{}", "processes": "{}", "device": "{}", "images/s": "{:,.0f}"}
    columns |= {"s per epoch": "{:.2f}", "min": "{:.2f}", "max": "{:.2f}"}
    columns |= {"s in all": "{:.1f}", "test accuracy": "{:.2%}", "weights differ by": "{:.1e}"}
    rows, bars = [], {}
    for way, runs in measured["runs"].items():
        epochs = [run["loop_s"] / measured["epochs"] for run in runs]
        run, bars[way] = runs[0], statistics.median(epochs)
        device = f"{run['replicas']} x {run['device']}" if run["replicas"] > 1 else run["device"]
        rows.append([way, run["processes"], device, run["images"] / bars[way], bars[way], min(epochs), max(epochs)])
        in_all = statistics.median(each["seconds"] for each in runs)
        rows[-1] += [in_all, run["accuracy"], max(each["difference"] for each in runs)]
    what = "MNIST on every topology: largest difference of a weight to one process on the CPU"
    goals = [common.Goal(what, max(row[-1] for row in rows), LIMIT, "{:.1e}")]
    bars = common.Bars("MNIST, batch 256: seconds per epoch", bars, ours=len(bars))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
