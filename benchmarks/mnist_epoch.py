"""One epoch of MNIST at batch 64.

    python benchmarks/mnist_epoch.py

784-128-10 with SiLU and AdamW, one process, one thread; the time of the training loop alone. The blog's loader decodes
and normalises one image at a time, in Python, in every epoch; the script decodes all images once, and gathers a batch
of bytes in one call.

- script: scripts/mnist_mlp.py, unchanged, with the checkpoint that ends its epoch; and without that
- bare loop: normalised tensors in memory and a plain PyTorch loop, nothing else: the limit
- PyTorch example: the loop of pytorch/examples' mnist/main.py, with its transforms, its loader, and the loss that it
  prints every 10 batches
- blog: torchvision's MNIST, ToTensor and a shuffling DataLoader, without and with 2 workers
"""

import contextlib
import functools
import io
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.datasets.images_in_memory import load_images

BATCH, HIDDEN, LR = 64, 128, 1e-3
GOAL = 1.15  # x the time of a bare loop


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, dataset=True)
    help = "turns of script and bare loop in a round (%(default)s)"
    parser.add_argument("--fast", type=common.positive_int, default=5, help=help)
    return parser.parse_args()


def script(dataset: str) -> list[float]:
    """Seconds of one epoch, and of the checkpoint in it."""
    flags = ["--dataset", dataset, "--batch_size", BATCH, "--hidden", HIDDEN, "--lr", LR, "--weight_decay", 0]
    summary, _ = common.run_script("mnist_mlp", *flags, "--num_epochs", 1)
    return [summary["train_time_s"], summary["checkpoint_time_s"]]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 10))
    model.to(common.device())
    return model, torch.optim.AdamW(model.parameters(), LR, weight_decay=0, fused=True)


@functools.cache
def normalised(dataset: str) -> tuple[torch.Tensor, torch.Tensor]:
    train, _ = load_images(dataset)
    images, labels = train.tensors
    return ((images.float() - 33.3184) / 78.5675).to(common.device()), labels.to(common.device())


def bare(dataset: str) -> float:
    images, labels = normalised(dataset)
    model, optimizer = build()
    began = time.perf_counter()
    order = torch.randperm(len(labels), device=labels.device)
    for indices in order.split(BATCH):
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()  # a GPU is done only now
    return time.perf_counter() - began


def with_loader(folder: str, print_every: int = 0, **options) -> float:
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(folder, train=True, transform=transform)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, **options)
    model, optimizer = build()
    device = common.device()
    began = time.perf_counter()
    for i, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if print_every and i % print_every == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                done = f"{i * len(images)}/{len(dataset)} ({100 * i / len(loader):.0f}%)"
                print(f"[{done}]\tLoss: {loss.item():.6f}")
    loss.item()
    return time.perf_counter() - began


def measure(args) -> dict:
    example = {}  # options of the example's loader
    if common.device().type != "cpu":
        example = {"num_workers": 1, "persistent_workers": True, "pin_memory": True, "shuffle": True}
    with tempfile.TemporaryDirectory() as folder, common.threads(1):
        common.write_idx(Path(folder), args.dataset)
        fast = {"script": lambda: script(args.dataset), "bare loop": lambda: bare(args.dataset)}
        slow = {
            "PyTorch example": lambda: with_loader(folder, 10, **example),
            "blog, 0 workers": lambda: with_loader(folder, shuffle=True),
            "blog, 2 workers": lambda: with_loader(folder, shuffle=True, num_workers=2),
        }
        bare(args.dataset)  # warm-up
        measured = {way: [] for way in (*fast, *slow)}
        for _ in range(args.rounds):
            for way, seconds in (common.take_turns(fast, args.fast) | common.take_turns(slow, 1)).items():
                measured[way] += seconds
    return {"images": len(normalised(args.dataset)[1]), "seconds": measured}


def report(measured) -> common.Report:
    seconds = dict(measured["seconds"])
    runs = seconds.pop("script")
    ours = {
        "script": [epoch for epoch, _ in runs],
        "script, without its checkpoint": [epoch - checkpoint for epoch, checkpoint in runs],
    }
    medians = common.medians(ours | seconds)
    rate = {"images/s": lambda median: measured["images"] / median}
    table = common.compare(ours | seconds, "s", "bare loop", "{:.2f}", **rate)
    ratios = {way: median / medians["bare loop"] for way, median in medians.items()}
    goals = [common.Goal("MNIST epoch, batch 64, against a bare loop", ratios["script"], GOAL, "{:.2f} x the time")]
    for way in ("blog, 0 workers", "blog, 2 workers"):
        what, faster = f"MNIST epoch, batch 64, against the {way}", medians[way] / medians["script"]
        goals.append(common.Goal(what, faster, 8, "{:.2f} x as fast", at_least=True))
    bars = common.Bars("MNIST epoch, time / bare loop", ratios, goal=GOAL, ours=2)
    return common.Report([table], [bars], goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
