"""ResNet-50: training, image files, and a second process.

    python benchmarks/resnet50.py                      # all of it
    python benchmarks/resnet50.py train --sizes 224    # or some of: train, files, scaling

- train: images/s on random images: scripts/resnet50.py in float32, and in bf16 where the machine
  has instructions for it; a plain loop (float32, contiguous, as in blog posts); and a loop like
  that of PyTorch's ImageNet example, which reads loss, top-1 and top-5 accuracy after each step
- files: images/s from JPEG files to a batch of 224 x 224 pixels, with random crop and flip, on one
  core: our loader, and torchvision's reference transforms with PIL; a photo with grain, quality 90
- scaling: images/s of two processes with one thread each, against one process with one thread;
  64 x 64 pixels, 64 images for each process and step
"""

import functools
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import torch
import torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.datasets.image_files import ImageFiles, RandomAugment
from utils.loader import GlobalLoader

BATCH = {32: 64, 64: 32, 224: 16}
FILES = {(500, 375): 96, (2000, 1500): 24}


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    parts = ("train", "files", "scaling")
    add = parser.add_argument
    add("parts", nargs="*", default=list(parts), help="train, files, scaling")
    add("--sizes", nargs="+", type=int, default=[64], help="pixels of a side (default: 64)")
    add("--steps", type=int, default=8, help="steps; the first two are not timed (default: 8)")
    add("--worker", help="for the processes that it launches: the file to write to")
    args = parser.parse_args()
    common.refuse_unknown(parser, "part", args.parts, parts)
    return args


def script(size: int, batch: int, steps: int) -> float:
    """Images/s of scripts/resnet50.py without its first two steps."""
    flags = ["--synthetic", "--image_size", size, "--batch_size", batch]
    _, lines = common.run_script("resnet50", *flags, "--max_steps", steps, "--log_every", 2)
    rates = [line["samples_per_s"] for line in lines if line["split"] == "train"][1:]
    return statistics.harmonic_mean(rates) if rates else 0.0  # only the main process has them


def plain(size: int, batch: int, steps: int) -> float:
    """Images/s of the loop in a blog post."""
    device = common.device()
    model = torchvision.models.resnet50().to(device)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    loss.item()
    return (steps - 2) * batch / (time.perf_counter() - began)


def example(size: int, batch: int, steps: int) -> float:
    """Images/s of a loop like that of PyTorch's ImageNet example.

    It reads loss, top-1 and top-5 accuracy after each step.
    """
    device = common.device()
    model = torchvision.models.resnet50().to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(images)
        loss = criterion(logits, labels)
        hits = logits.topk(5, 1)[1] == labels[:, None]
        top1, top5 = hits[:, 0].float().mean(), hits.any(1).float().mean()
        for value in (loss, top1, top5):
            value.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (steps - 2) * batch / (time.perf_counter() - began)


def has_bf16() -> bool:
    if common.device().type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def train(args) -> dict:
    measured = {}
    for size in args.sizes:
        batch = BATCH.get(size, 16)
        ways = {"script": script, "plain loop": plain, "ImageNet example": example}
        ways = {way: functools.partial(run, size, batch, args.steps) for way, run in ways.items()}
        if has_bf16():
            in_bf16 = mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION="bf16")
            ways["script, bf16"] = in_bf16(ways["script"])
        measured[f"{size} x {size} pixels, batch {batch}"] = common.take_turns(ways, args.rounds)
    return measured


def photo(width: int, height: int) -> bytes:
    """A JPEG of a photo (matplotlib's, of Grace Hopper) with grain: 0.2 to 0.4 bytes a pixel."""
    import matplotlib
    import numpy as np
    from PIL import Image

    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    image = Image.open(file).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image).astype(float)
    pixels += np.random.default_rng(0).normal(0, 5, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def make_loader(content: bytes, count: int) -> GlobalLoader:
    """A loader with batches of `count` items, each of which is the same file."""
    rows = [{"image": {"bytes": content, "path": None}}] * count
    labels = torch.zeros(count, dtype=torch.int64)
    split = SimpleNamespace(rows=rows, image_column="image", dataset="", labels=labels, classes=["photo"])
    data = ImageFiles(split, RandomAugment(224))
    one_process = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, gradient_accumulation_steps=1
    )
    return GlobalLoader(data, count, one_process, seed=0, collate_fn=data.collate)


def files(args) -> dict:
    from PIL import Image
    from torchvision import transforms

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    measured = {}
    for (width, height), count in FILES.items():
        content = photo(width, height)
        loader = make_loader(content, count)
        rates = {"loader": [], "reference": []}
        for epoch in range(args.rounds + 1):
            began = time.perf_counter()
            for batch in loader.epoch(epoch):
                assert len(batch) == count
            middle = time.perf_counter()
            opened = (Image.open(io.BytesIO(content)).convert("RGB") for _ in range(count))
            torch.stack([reference(image) for image in opened])
            if epoch:  # the first one warms up
                rates["loader"].append(count / (middle - began))
                rates["reference"].append(count / (time.perf_counter() - middle))
        measured[f"{width} x {height} pixels, {len(content):,} bytes"] = rates
    torch.set_num_threads(threads)
    return measured


def worker(args) -> None:
    """Run the script in the processes of this launch, with 64 images and one thread in each."""
    with mock.patch.object(psutil, "cpu_count", return_value=1):
        rate = script(64, 64 * int(os.environ.get("WORLD_SIZE", 1)), args.steps)
    if os.environ.get("RANK", "0") == "0":
        Path(args.worker).write_text(json.dumps(rate))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def scaling(args) -> dict:
    def launch(config: str):
        return common.launch_workers(config, __file__, "--steps", args.steps)

    ways = {"1 process": functools.partial(launch, "cpu"), "2 processes": functools.partial(launch, "cpu_ddp")}
    title = "64 x 64 pixels, 64 images and one thread in each process"
    return {title: common.take_turns(ways, args.rounds)}


def measure(args) -> dict:
    return {part: globals()[part](args) for part in args.parts}


def report(measured) -> common.Report:
    bases = {"train": "plain loop", "files": "reference", "scaling": "1 process"}
    tables, bars = [], []
    for part, runs in measured.items():
        for run, rates in runs.items():
            title = f"{part.capitalize()}, {run}"
            table = common.compare(rates, "images/s", bases[part], "{:.1f}")
            tables.append(f"{title}:\n\n{table}")
            if part == "train":
                medians = {way: statistics.median(each) for way, each in rates.items()}
                ratios = {way: medians["plain loop"] / median for way, median in medians.items()}
                bars.append(common.Bars(f"ResNet-50, {run}: time / plain loop", ratios))
    return common.Report(tables, bars, [])


if __name__ == "__main__":
    args = parse_args()
    if args.worker:
        worker(args)
    else:
        common.main(args, measure, report)
