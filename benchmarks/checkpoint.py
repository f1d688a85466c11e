"""How long a checkpoint of ResNet-50 blocks training.

    python benchmarks/checkpoint.py

scripts/resnet50.py on random images, with a checkpoint every 4 steps: the time that training
waits for one, divided by that of 100 steps. A checkpoint has 200 MB, with the momentum, and a
SHA-256 of each file, and is flushed to the disk (fsync). Instead: torch.save of the same states,
which returns before the file is on the disk; and with an fsync after it.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

SIZES = {"32 pixels, batch 64": (32, 64), "64 pixels, batch 32": (64, 32)}
EVERY = 4


def parse_args():
    parser = common.make_parser(__doc__, rounds=5)
    sizes = {"choices": SIZES, "default": list(SIZES), "help": ", or ".join(SIZES)}
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", **sizes)
    return parser.parse_args()


def torch_save(rounds: int) -> dict[str, list[float]]:
    model = torchvision.models.resnet50().to(common.device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32, device=common.device())).sum().backward()
    optimizer.step()
    results = {"torch.save": [], "torch.save, fsync": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            began = time.perf_counter()
            with open(Path(folder) / "checkpoint.pt", "wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                results["torch.save"].append(time.perf_counter() - began)
                file.flush()
                os.fsync(file.fileno())
            results["torch.save, fsync"].append(time.perf_counter() - began)
    return results


def measure(args) -> dict:
    measured = {"steps": {}, "script": {}, "instead": torch_save(args.rounds)}
    for name in args.sizes:
        size, batch = SIZES[name]
        flags = ["--synthetic", "--image_size", size, "--batch_size", batch]
        flags += ["--checkpoint_every", EVERY, "--max_steps", EVERY * args.rounds]
        summary, _ = common.run_script("resnet50", *flags)
        checkpoints_s = summary["checkpoint_time_s"]
        measured["script"][name] = checkpoints_s / args.rounds
        measured["steps"][name] = (summary["train_time_s"] - checkpoints_s) / summary["step"]
    return measured


def report(measured) -> common.Report:
    columns = {
        "run": "{}",
        "a step, s": "{:.3f}",
        "way": "{}",
        "a checkpoint, s": "{:.2f}",
        "of 100 steps": "{:.2%}",
    }
    instead = {way: statistics.median(seconds) for way, seconds in measured["instead"].items()}
    rows, shares, goals = [], {}, []
    for name, step_s in measured["steps"].items():
        for way, save_s in {"script": measured["script"][name], **instead}.items():
            share = save_s / (100 * step_s)
            rows.append([name, step_s, way, save_s, share])
            if way == "script":
                what = f"Checkpoint of ResNet-50, {name}, of 100 steps"
                goals.append(common.Goal(what, 100 * share, 5, "{:.1f} %"))
        shares[name] = 100 * measured["script"][name] / (100 * step_s)
    bars = common.Bars("ResNet-50: checkpoint, % of 100 steps", shares, goal=5, ours=len(shares))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
