"""Accelerate's share of a step.

    python benchmarks/accelerate_share.py

The step of the scripts, in one process: with Accelerate's wrappers, then without them (`loss.backward()`, the optimizer
and the scheduler inside, no `accumulate`), in turns of 50 steps (ResNet-50: of 1), on the same model. A wrapper's own
time is the time of its call minus the time of the call inside it. The share is the sum of these over the median time of
a step. The last two columns check it in a second way, which is less exact where the speed of the machine drifts. The
forward pass has no wrapper in float32. On a GPU these are times of the process that starts its kernels.
"""

import argparse
import functools
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
import torchvision
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp, resnet50
from utils import launch

PARTS = ("accumulate", "backward", "optimizer.step", "scheduler.step", "optimizer.zero_grad")


def parse_args():
    parser = common.make_parser(__doc__, rounds=12)
    parser.add_argument("--steps", type=common.positive_int, default=50, help="of MNIST in a turn (%(default)s)")
    return parser.parse_args()


class Clock:
    """Wraps a function, and adds up the seconds spent in it."""

    def __init__(self, function):
        self.function = function
        self.seconds = 0.0
        # Also copies the mark by which a scheduler knows the optimizer.step that it counts.
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        began = perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - began

    def __get__(self, instance, _):  # as a method of torch.Tensor
        return lambda *args, **kwargs: self(instance, *args, **kwargs)


def alternate(
    accelerator, compute_losses, model, optimizer, scheduler, batch, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each step, and of each wrapper in it.

    Args:
        compute_losses: called as (model, images, labels), returns one loss per sample, (N,).
    """
    images, labels = batch
    scale = 1 / len(labels)
    inner = {
        "backward": Clock(torch.Tensor.backward),
        "optimizer.step": Clock(optimizer.optimizer.step),
        "scheduler.step": Clock(scheduler.scheduler.step),
        "optimizer.zero_grad": Clock(optimizer.optimizer.zero_grad),
    }
    seconds = defaultdict(list)

    def own(part, began, ended):
        seconds[part].append(ended - began - inner[part].seconds)

    def with_accelerate():
        for clock in inner.values():
            clock.seconds = 0.0
        began = perf_counter()
        with accelerator.accumulate(model):
            entered = perf_counter()
            losses = compute_losses(model, images, labels)
            forwarded = perf_counter()
            accelerator.backward(losses.sum() * scale)
            backed = perf_counter()
            optimizer.step()
            stepped = perf_counter()
            scheduler.step()
            scheduled = perf_counter()
            optimizer.zero_grad()
            zeroed = perf_counter()
        left = perf_counter()
        seconds["step"].append(left - began)
        seconds["accumulate"].append(entered - began + left - zeroed)
        own("backward", forwarded, backed)
        own("optimizer.step", backed, stepped)
        own("scheduler.step", stepped, scheduled)
        own("optimizer.zero_grad", scheduled, zeroed)

    def without():
        began = perf_counter()
        losses = compute_losses(model, images, labels)
        (losses.sum() * scale).backward()
        optimizer.optimizer.step()
        scheduler.scheduler.step()
        optimizer.optimizer.zero_grad()
        seconds["bare step"].append(perf_counter() - began)

    with (
        mock.patch.object(torch.Tensor, "backward", inner["backward"]),
        mock.patch.object(optimizer.optimizer, "step", inner["optimizer.step"]),
        mock.patch.object(optimizer.optimizer, "zero_grad", inner["optimizer.zero_grad"]),
        mock.patch.object(scheduler.scheduler, "step", inner["scheduler.step"]),
    ):
        for round in range(-1, rounds):
            if round == 0:
                seconds.clear()  # of the warm-up
            for way in (with_accelerate, without)[:: -1 if round % 2 else 1]:
                for _ in range(steps):
                    way()
    return seconds


def mnist_losses(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="none")


def resnet50_losses(model, images, labels):
    losses, *_ = resnet50.losses_and_predictions(model, images, labels)
    return losses


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = launch.make_accelerator(argparse.Namespace(output_dir=folder), cpu_threads=1)
    device, measured = accelerator.device, {}
    for name, batch_size, steps in (("MNIST", 64, args.steps), ("MNIST", 256, args.steps), ("ResNet-50", 32, 1)):
        if name == "MNIST":
            compute_losses = mnist_losses
            model, shape, classes = mnist_mlp.MLP(784, 192, 10), (batch_size, 28, 28, 1), 10
            optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1, fused=True)
        else:
            compute_losses = resnet50_losses
            model, shape, classes = torchvision.models.resnet50(), (batch_size, 64, 64, 3), 1000
            model = model.to(memory_format=torch.channels_last)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)
        images = torch.randint(256, shape, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        labels = torch.randint(classes, (batch_size,), device=device)
        prepared = accelerator.prepare(model, optimizer, scheduler)
        rounds = args.rounds if name == "ResNet-50" else 5 * args.rounds
        batch = images, labels
        parts = alternate(accelerator, compute_losses, *prepared, batch, steps, rounds)
        medians = {part: statistics.median(seconds) for part, seconds in parts.items()}
        measured[f"{name}, batch {batch_size}"] = medians
    return measured


def report(measured) -> common.Report:
    columns = {"run": "{}"} | {f"{part}, us": "{:.0f}" for part in PARTS}
    columns |= {"together, us": "{:.0f}", "step, us": "{:,.0f}", "share": "{:.2%}"}
    columns |= {"bare step, us": "{:,.0f}", "step / bare step": "{:.3f}"}
    rows, shares = [], {}
    for run, parts in measured.items():
        own = [parts[part] for part in PARTS]
        step, bare = parts["step"], parts["bare step"]
        shares[run] = {part: 100 * parts[part] / step for part in PARTS}
        times = [1e6 * seconds for seconds in (*own, sum(own), step)]
        rows.append([run, *times, sum(own) / step, 1e6 * bare, step / bare])
    bars = common.Bars("Accelerate's share of a step, %", shares, ours=len(shares))
    return common.Report([common.table(columns, rows)], [bars], [])


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
