"""ResNet-50: training, image files, and a second process.

    python benchmarks/resnet50.py

One thread per process: with two, the speed of the same code varies by 30 % from one process to the next, with one by
1 %.

- train: images/s of 64 x 64 pixels, batch 32, random: scripts/resnet50.py, and a plain loop as in blog posts, which
  neither logs nor keeps the images in the channels-last format
- files: images/s from JPEG files to a batch of 224 x 224 pixels, with random crop and flip: scripts/resnet50.py without
  workers, with a linear layer in the place of the ResNet; and torchvision's reference transforms with PIL. The files
  are a photo with grain, quality 90
- scaling: images/s of scripts/resnet50.py on one process and on two; 64 x 64 pixels, 32 images per process and step
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

import matplotlib
import numpy as np
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, gpus

SIZE = 64  # pixels
PHOTOS = {(500, 375): 96, (2000, 1500): 24}  # width and height of the files, and how many
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--batch_size", type=common.positive_int, default=32, help="of `train` (%(default)s)")
    add("--steps", type=int, default=8, help="steps, of which the first two are not timed (%(default)s)")
    add("--images", type=common.positive_int, default=32, help="of `scaling`, per process and step (%(default)s)")
    add("--photos", type=common.positive_int, help="number of files (96 small ones and 24 large ones)")
    return parser.parse_args()


def script_flags(batch_size: int, steps: int) -> list:
    flags = ["--synthetic", "--image_size", SIZE, "--batch_size", batch_size]
    return [*flags, "--max_steps", steps, "--log_every", 2]


def rate(lines: list[dict]) -> float:
    """Images/s of a run without its first two steps."""
    return statistics.harmonic_mean([line["samples_per_s"] for line in lines if line["split"] == "train"][1:])


def train(args) -> dict[str, list[float]]:
    ways = {
        "plain loop": functools.partial(gpus.plain_loop, args.batch_size, SIZE, args.steps, untimed=2),
        "resnet50.py": lambda: rate(common.run_script("resnet50", *script_flags(args.batch_size, args.steps))[1]),
    }
    return common.take_turns(ways, args.rounds)


def worker(args) -> float:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    with common.threads(1):
        _, lines = common.run_script("resnet50", *script_flags(args.images * processes, args.steps))
    return rate(lines) if lines else 0.0  # only the main process has them


def scaling(args) -> dict[str, list[float]]:
    ways = {
        "1 process": functools.partial(common.launch_workers, "cpu", __file__),
        "2 processes": functools.partial(common.launch_workers, "cpu_ddp", __file__),
    }
    return common.take_turns(ways, args.rounds)


def photo(width: int, height: int) -> bytes:
    """A JPEG of a photo (matplotlib's, of Grace Hopper) with grain: 0.2 to 0.4 bytes per pixel."""
    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    image = Image.open(file).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image) + np.random.default_rng(0).normal(0, 5, (height, width, 3))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_photos(folder: Path, content: bytes, count: int) -> None:
    """A dataset of `count` training images and two test images, all the same, in two classes."""
    for split, number in (("train", count), ("test", 2)):
        for i in range(number):
            file = folder / split / "ab"[i % 2] / f"{i}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def linear(num_classes: int) -> nn.Module:
    """A model of a color's mean that costs nothing beside the decoding."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))


def decode_by_script(folder: str, count: int) -> float:
    flags = ["--dataset", folder, "--num_workers", 0, "--image_size", 224, "--min_crop", 0.08, "--flip", 0.5]
    with mock.patch.object(torchvision.models, "resnet50", linear):
        summary, _ = common.run_script("resnet50", *flags, "--batch_size", count, "--max_steps", 1)
    return count / common.training_s(summary)


def decode_by_reference(content: bytes, count: int) -> float:
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    steps += [transforms.ConvertImageDtype(torch.float), transforms.Normalize(MEAN, STD)]
    reference = transforms.Compose(steps)
    began = time.perf_counter()
    torch.stack([reference(Image.open(io.BytesIO(content)).convert("RGB")) for _ in range(count)])
    return count / (time.perf_counter() - began)


def files(args, width: int, height: int) -> dict[str, list[float]]:
    content, count = photo(width, height), args.photos or PHOTOS[width, height]
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), content, count)
        ways = {
            "reference": functools.partial(decode_by_reference, content, count),
            "resnet50.py": functools.partial(decode_by_script, folder, count),
        }
        return common.take_turns(ways, args.rounds, warm_up=True)


def measure(args) -> dict:
    with common.threads(1):
        measured = {"Train": train(args)}
        measured |= {f"Files, {width} x {height} pixels": files(args, width, height) for width, height in PHOTOS}
    return measured | {"Scaling": scaling(args)}


def report(measured) -> list[str]:
    return [common.compare("part", measured.items(), "images/s", "first", "{:.1f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
