"""Accelerate's share of a step.

    python benchmarks/accelerate_share.py

The step of the scripts, in one process: with Accelerate's wrappers, then with the wrappers taken away
(`loss.backward()`, the optimizer and the scheduler inside, no `accumulate`), in turns of 50 steps (ResNet-50: of 1), on
the same model. A wrapper's own time is that of its call less that of the call inside it; their sum over the median of
the step is the share. The last two columns check it another way, blurred by the drift of the machine. The forward pass
has no wrapper in float32. On a GPU these are times of the process that feeds it.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp, resnet50
from utils import launch

PARTS = ("accumulate", "backward", "optimizer.step", "scheduler.step")


def parse_args():
    return common.make_parser(__doc__, rounds=12).parse_args()


class Clock:
    """Wraps a function, and adds up the seconds spent in it."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0
        functools.update_wrapper(self, function)  # with the mark by which a scheduler knows the step that it counts

    def __call__(self, *args, **kwargs):
        began = perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - began

    def __get__(self, instance, _):  # as a method of torch.Tensor
        return lambda *args, **kwargs: self(instance, *args, **kwargs)


def alternate(accelerator, model, optimizer, scheduler, batch, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, and of each wrapper in it."""
    batch_size = len(batch[1])
    inner = dict(
        zip(
            PARTS[1:],
            map(Clock, (torch.Tensor.backward, optimizer.optimizer.step, scheduler.scheduler.step)),
            strict=True,
        )
    )
    seconds = defaultdict(list)

    def own(part, began, ended):
        seconds[part].append(ended - began - inner[part].seconds)

    def with_accelerate():
        for clock in inner.values():
            clock.seconds = 0.0
        began = perf_counter()
        with accelerator.accumulate(model):
            entered = perf_counter()
            losses = model(*batch)[0]
            forwarded = perf_counter()
            accelerator.backward(losses.sum() * (1 / batch_size))
            backed = perf_counter()
            optimizer.step()
            stepped = perf_counter()
        left = perf_counter()
        scheduler.step()
        scheduled = perf_counter()
        model.zero_grad()
        seconds["step"].append(perf_counter() - began)
        seconds["accumulate"].append(entered - began + left - stepped)
        own("backward", forwarded, backed)
        own("optimizer.step", backed, stepped)
        own("scheduler.step", left, scheduled)

    def without():
        began = perf_counter()
        losses = model(*batch)[0]
        (losses.sum() * (1 / batch_size)).backward()
        optimizer.optimizer.step()
        scheduler.scheduler.step()
        model.zero_grad()
        seconds["bare step"].append(perf_counter() - began)

    with (
        mock.patch.object(torch.Tensor, "backward", inner["backward"]),
        mock.patch.object(optimizer.optimizer, "step", inner["optimizer.step"]),
        mock.patch.object(scheduler.scheduler, "step", inner["scheduler.step"]),
    ):
        for round in range(-1, rounds):
            if round == 0:
                seconds.clear()  # of the warm-up
            for way in (with_accelerate, without)[:: -1 if round % 2 else 1]:
                for _ in range(steps):
                    way()
    return seconds


def measure(args) -> dict:
    names = {"batch_size": 64, "gradient_accumulation_steps": 1, "seed": 0, "timeout_s": 600, "log_with": None}
    with tempfile.TemporaryDirectory() as folder:
        accelerator = launch.make_accelerator(argparse.Namespace(**names, output_dir=folder))
    threads, device, measured = torch.get_num_threads(), accelerator.device, {}
    for name, batch_size, steps in (("MNIST", 64, 50), ("MNIST", 256, 50), ("ResNet-50", 32, 1)):
        if name == "MNIST":
            torch.set_num_threads(1)
            model, shape, classes = mnist_mlp.MLP(784, 192, 10), (batch_size, 28, 28, 1), 10
            optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1, fused=True)
        else:
            torch.set_num_threads(threads)
            model, shape, classes = resnet50.ResNet50(1000), (batch_size, 64, 64, 3), 1000
            model = model.to(memory_format=torch.channels_last)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**6)
        images = torch.randint(256, shape, dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
        labels = torch.randint(classes, (batch_size,), device=device)
        prepared = accelerator.prepare(model, optimizer, scheduler)
        rounds = args.rounds if name == "ResNet-50" else 5 * args.rounds
        parts = alternate(accelerator, *prepared, (images, labels), steps, rounds)
        measured[f"{name}, batch {batch_size}"] = {part: statistics.median(each) for part, each in parts.items()}
    return measured


def report(measured) -> common.Report:
    columns = {"run": "{}"} | {f"{part}, us": "{:.0f}" for part in PARTS}
    columns |= {"together, us": "{:.0f}", "step, us": "{:,.0f}", "share": "{:.2%}"}
    columns |= {"bare step, us": "{:,.0f}", "step / bare step": "{:.3f}"}
    rows, shares = [], {}
    for run, parts in measured.items():
        own = [parts[part] for part in PARTS]
        shares[run] = {part: 100 * seconds / parts["step"] for part, seconds in zip(PARTS, own, strict=True)}
        times = [1e6 * seconds for seconds in (*own, sum(own), parts["step"])]
        rows.append(
            [run, *times, sum(own) / parts["step"], 1e6 * parts["bare step"], parts["step"] / parts["bare step"]]
        )
    return common.Report(
        [common.table(columns, rows)], [common.Bars("Accelerate's share of a step, %", shares, ours=len(shares))], []
    )


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
