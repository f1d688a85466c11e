"""How long a checkpoint of ResNet-50 blocks training.

    python benchmarks/checkpoint.py

scripts/resnet50.py on random images, with a checkpoint every 4 steps: the time that training waits for one, divided by
the time of 100 steps. A checkpoint has 200 MB, with the momentum, and a SHA-256 of each file, and is flushed to the
disk (fsync). The other ways: torch.save of the same states, which returns before the file is on the disk; and with an
fsync after it.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

EVERY = 4


def parse_args():
    parser = common.make_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--sizes", nargs="+", default=["32x64", "64x32"], metavar="PIXELSxBATCH", help="%(default)s")
    return parser.parse_args()


def torch_save(rounds: int) -> dict[str, list[float]]:
    """Seconds of torch.save without and with the fsync, in each round."""
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
    measured = {"script": {}, "instead": torch_save(args.rounds)}
    for size in args.sizes:
        pixels, batch = size.split("x")
        flags = ["--synthetic", "--image_size", pixels, "--batch_size", batch]
        flags += ["--checkpoint_every", EVERY, "--max_steps", EVERY * args.rounds]
        summary, _ = common.run_script("resnet50", *flags)
        step_s = common.training_s(summary) / summary["step"]
        measured["script"][f"{pixels} pixels, batch {batch}"] = [step_s, summary["checkpoint_time_s"] / args.rounds]
    return measured


def report(measured) -> common.Report:
    columns = {"run": "{}", "time of a step, s": "{:.3f}", "way": "{}"}
    columns |= {"time of a checkpoint, s": "{:.2f}", "of 100 steps": "{:.2%}"}
    rows, shares = [], {}
    for name, (step_s, save_s) in measured["script"].items():
        for way, seconds in {"script": save_s, **common.medians(measured["instead"])}.items():
            rows.append([name, step_s, way, seconds, seconds / (100 * step_s)])
        shares[name] = save_s / step_s  # in percent of 100 steps
    goals = [
        common.Goal(f"Checkpoint of ResNet-50, {name}, of 100 steps", share, 5, "{:.1f} %")
        for name, share in shares.items()
    ]
    bars = common.Bars("ResNet-50: checkpoint, % of 100 steps", shares, goal=5, ours=len(shares))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
