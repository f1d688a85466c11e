"""How long a checkpoint of ResNet-50 holds up training.

    python benchmarks/checkpoint.py

scripts/resnet50.py on random images with a checkpoint every 4 steps: the time for which training waits for one. A
checkpoint has 200 MB with the momentum, a SHA-256 of each file, and is flushed to the disk (fsync). The other ways:
torch.save of the same states, which returns before the file is on the disk; and with an fsync after it.
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
    parser = common.make_parser(__doc__, rounds=3)
    parser.add_argument("--batch_size", type=common.positive_int, default=32, help="of 64 x 64 pixels (%(default)s)")
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
    flags = ["--synthetic", "--image_size", 64, "--batch_size", args.batch_size]
    flags += ["--checkpoint_every", EVERY, "--max_steps", EVERY * args.rounds]
    summary, _ = common.run_script("resnet50", *flags)
    script_s = summary["checkpoint_time_s"] / args.rounds  # of each
    step_s = common.training_s(summary) / summary["step"]
    return {"step_s": step_s, "ways": {"resnet50.py": [script_s], **torch_save(args.rounds)}}


def report(measured) -> list[str]:
    columns = {"way": "{}", "s per checkpoint": "{:.2f}", "steps in that time": "{:.2f}"}
    seconds = common.medians(measured["ways"])
    rows = [[way, checkpoint_s, checkpoint_s / measured["step_s"]] for way, checkpoint_s in seconds.items()]
    return [common.table(columns, rows)]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
