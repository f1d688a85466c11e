"""ResNet-50: training, image files, and a second process.

    python benchmarks/resnet50.py                      # all parts
    python benchmarks/resnet50.py train --sizes 224    # or some of: train, files, scaling

One thread per process: with two, the speed of the same code varies by 30 % from one process to the next, with one by
1 %.

- train: images/s on random images: scripts/resnet50.py in float32, and in bf16 where the machine has instructions for
  it; a plain loop (float32, contiguous, as in blog posts); and a loop like PyTorch's ImageNet example, which reads
  loss, top-1 and top-5 accuracy after each step
- files: images/s from JPEG files to a batch of 224 x 224 pixels, with random crop and flip: scripts/resnet50.py without
  workers, with a linear layer in the place of the ResNet; and torchvision's reference transforms with PIL; a photo with
  grain, quality 90
- scaling: images/s of two processes against one; 64 x 64 pixels, 64 images per process and step
"""

import functools
import io
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

BATCH = {32: 64, 64: 32, 224: 16}
PHOTOS = {(500, 375): 96, (2000, 1500): 24}


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, worker=True)
    parts, add = ("train", "files", "scaling"), parser.add_argument
    add("parts", nargs="*", default=list(parts), help="train, files, scaling")
    add("--sizes", nargs="+", type=int, default=[64], help="side of the images of `train`, in pixels (%(default)s)")
    add("--steps", type=int, default=8, help="steps, of which the first two are not timed (%(default)s)")
    add("--images", type=common.positive_int, default=64, help="of `scaling`, per process and step (%(default)s)")
    add("--photos", type=common.positive_int, help="number of files (96 small ones and 24 large ones)")
    args = parser.parse_args()
    common.check_names(parser, "part", args.parts, parts)
    return args


def script(size: int, batch: int, steps: int) -> float:
    """Images/s of scripts/resnet50.py without its first two steps."""
    flags = ["--synthetic", "--image_size", size, "--batch_size", batch]
    _, lines = common.run_script("resnet50", *flags, "--max_steps", steps, "--log_every", 2)
    rates = [line["samples_per_s"] for line in lines if line["split"] == "train"][1:]
    return statistics.harmonic_mean(rates) if rates else 0.0  # only the main process has them


def plain(size: int, batch: int, steps: int, as_example: bool = False) -> float:
    """Images/s of the loop in a blog post; as_example: it reads the loss and accuracies of each step."""
    device = common.device()
    model = torchvision.models.resnet50().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4 if as_example else 0)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        images, labels = (tensor.to(device, non_blocking=as_example) for tensor in (images, labels))
        logits = model(images)
        loss = criterion(logits, labels)
        if as_example:
            hits = logits.topk(5, 1)[1] == labels[:, None]
            for value in (loss, hits[:, 0].float().mean(), hits.any(1).float().mean()):
                value.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()
    return (steps - 2) * batch / (time.perf_counter() - began)


def has_bf16() -> bool:
    if common.device().type != "cpu":
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def train(args) -> dict:
    measured = {}
    for size in args.sizes:
        batch = BATCH.get(size, 16)
        ways = {
            "script": functools.partial(script, size, batch, args.steps),
            "plain loop": functools.partial(plain, size, batch, args.steps),
            "ImageNet example": functools.partial(plain, size, batch, args.steps, as_example=True),
        }
        if has_bf16():
            ways["script, bf16"] = mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION="bf16")(ways["script"])
        measured[f"{size} x {size} pixels, batch {batch}"] = common.take_turns(ways, args.rounds)
    return measured


def photo(width: int, height: int) -> bytes:
    """A JPEG of a photo (matplotlib's, of Grace Hopper) with grain: 0.2 to 0.4 bytes per pixel."""
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


def write_photos(folder: Path, content: bytes, count: int) -> None:
    """A data set of `count` training images and two test images, all the same, in two classes."""
    for split, number in (("train", count), ("test", 2)):
        for i in range(number):
            file = folder / split / "ab"[i % 2] / f"{i}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def linear(num_classes: int) -> nn.Module:
    """A model of a color's mean that costs nothing beside the decoding."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))


def decode_by_script(folder: Path, count: int) -> float:
    """Images/s of scripts/resnet50.py from JPEG files, with a model that costs nothing."""
    flags = ["--dataset", folder, "--num_workers", 0, "--image_size", 224, "--min_crop", 0.08, "--flip", 0.5]
    with mock.patch.object(torchvision.models, "resnet50", linear):
        summary, _ = common.run_script("resnet50", *flags, "--batch_size", count, "--max_steps", 1)
    return count / common.training_s(summary)


def decode_by_reference(content: bytes, count: int) -> float:
    from PIL import Image
    from torchvision import transforms

    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    steps += [transforms.ConvertImageDtype(torch.float)]
    steps += [transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    reference = transforms.Compose(steps)
    began = time.perf_counter()
    torch.stack([reference(Image.open(io.BytesIO(content)).convert("RGB")) for _ in range(count)])
    return count / (time.perf_counter() - began)


def files(args) -> dict:
    measured = {}
    for (width, height), count in PHOTOS.items():
        content, count = photo(width, height), args.photos or count
        with tempfile.TemporaryDirectory() as folder:
            write_photos(Path(folder), content, count)
            ways = {
                "script": functools.partial(decode_by_script, folder, count),
                "reference": functools.partial(decode_by_reference, content, count),
            }
            common.take_turns(ways, 1)  # warm-up
            measured[f"{width} x {height} pixels, {len(content):,} bytes"] = common.take_turns(ways, args.rounds)
    return measured


def scaling(args) -> dict:
    flags = ["--steps", args.steps, "--images", args.images]
    ways = {
        way: functools.partial(common.launch_workers, config, __file__, *flags)
        for way, config in (("1 process", "cpu"), ("2 processes", "cpu_ddp"))
    }
    return {f"64 x 64 pixels, {args.images} images per process": common.take_turns(ways, args.rounds)}


def worker(args) -> None:
    with common.threads(1):
        rate = script(64, args.images * int(os.environ.get("WORLD_SIZE", 1)), args.steps)
    common.finish_worker(args.worker, rate)


def measure(args) -> dict:
    parts = {"train": train, "files": files, "scaling": scaling}
    with common.threads(1):
        return {part: parts[part](args) for part in args.parts}


def report(measured) -> common.Report:
    bases = {"train": "plain loop", "files": "reference", "scaling": "1 process"}
    tables, bars = [], []
    for part, runs in measured.items():
        for run, rates in runs.items():
            table = common.compare(rates, "images/s", bases[part], "{:.1f}")
            tables.append(f"{part.capitalize()}, {run}:\n\n{table}")
            if part == "train":
                medians = common.medians(rates)
                ratios = {way: medians["plain loop"] / median for way, median in medians.items()}
                bars.append(common.Bars(f"ResNet-50, {run}: time / plain loop", ratios))
    return common.Report(tables, bars, [])


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
