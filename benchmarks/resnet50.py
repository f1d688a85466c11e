"""ResNet-50: training, image files, and two processes, each beside what a user would write instead.

    python benchmarks/resnet50.py                      # all three, on a CPU
    python benchmarks/resnet50.py train --sizes 224    # or one of: train, files, ddp

- train: images/s on random images; scripts/resnet50.py in float32 and bf16, a plain loop (float32, contiguous, as blog
  posts write it), and a loop like that of PyTorch's ImageNet example (accuracy and loss read after each step)
- files: images/s from JPEG files to a batch on one core; our loader, and torchvision's reference transforms through PIL
- ddp: images/s of two processes with one thread each, against one process with one thread, 64 pixels

The ways take turns, and a ratio is that of the medians: the speed of a shared machine drifts by more than they differ.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision import transforms

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.images import ImageLoader, random_augment  # noqa: E402

BATCH = {32: 64, 64: 32, 224: 16}


def script(size: int, batch: int, steps: int, *launch_flags, config="cpu.yaml", cores=None) -> float:
    """Images/s of scripts/resnet50.py without its first two updates."""
    with tempfile.TemporaryDirectory() as output:
        command = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / config]
        command += [*launch_flags, ROOT / "scripts" / "resnet50.py", "--synthetic", "--image_size", size]
        command += ["--batch_size", batch, "--max_steps", steps, "--log_every", 2, "--output_dir", output]
        pin = ["taskset", "-c", cores] if cores else []
        subprocess.run([*pin, sys.executable, *map(str, command)], check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
        rates = [line["images_per_s"] for line in lines if line["split"] == "train"][1:]
        return statistics.harmonic_mean(rates)


def plain(size: int, batch: int, steps: int, device: str = "cpu") -> float:
    """Images/s of the loop in a blog post."""
    model = torchvision.models.resnet50().to(device)
    criterion, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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


def example(size: int, batch: int, steps: int, device: str = "cpu") -> float:
    """Images/s of a loop like that of PyTorch's ImageNet example: loss, top-1 and top-5 are read after each step."""
    model = torchvision.models.resnet50().to(device)
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    for step in range(steps):
        if step == 2:
            began = time.perf_counter()
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = model(images)
        loss = criterion(logits, labels)
        hits = logits.topk(5, 1)[1] == labels[:, None]
        [value.item() for value in (loss, hits[:, 0].float().mean(), hits.any(1).float().mean())]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (steps - 2) * batch / (time.perf_counter() - began)


WAYS = {
    "script, bf16": lambda size, batch, steps: script(size, batch, steps, "--mixed_precision", "bf16"),
    "script, float32": script,
    "plain loop": plain,
    "ImageNet example": example,
}


def table(rates: dict[str, list[float]], base: str, unit: str = "images/s") -> None:
    middle = {way: statistics.median(values) for way, values in rates.items()}
    print(f"| way | median {unit} | min | max | / {base} |\n| --- | --- | --- | --- | --- |")
    for way, values in rates.items():
        print(
            f"| {way} | {middle[way]:.1f} | {min(values):.1f} | {max(values):.1f} | {middle[way] / middle[base]:.2f} |"
        )
    print(flush=True)


def train(args) -> None:
    for size in args.sizes:
        rates = {way: [] for way in WAYS if args.bf16 or "bf16" not in way}
        for _ in range(args.rounds):
            for way, values in rates.items():
                command = [sys.executable, __file__, "way", "--way", way, "--sizes", size, "--steps", args.steps]
                done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
                values.append(float(done.stdout.split()[-1]))
        print(f"Training, {size} pixels, batch {BATCH.get(size, 16)}, {args.steps - 2} updates\n")
        table(rates, "plain loop")


def photo(width: int, height: int) -> bytes:
    """A JPEG of a photograph (matplotlib's, of Grace Hopper) with the grain of a camera: 0.2 to 0.4 bytes a pixel."""
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    pixels = np.asarray(Image.open(file).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)).astype(float)
    pixels += np.random.default_rng(0).normal(0, 5, pixels.shape)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def files(args) -> None:
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
    one = SimpleNamespace(device=torch.device("cpu"))
    for (width, height), count in {(500, 375): 96, (2000, 1500): 24}.items():
        content = photo(width, height)
        rows = [{"image": {"bytes": content, "path": None}}] * count
        split = SimpleNamespace(rows=rows, image_column="image", dataset="", labels=None, classes=None)
        loader = ImageLoader(split, random_augment(224), one)
        rates = {"loader": [], "reference": []}
        for epoch in range(args.rounds + 1):
            began = time.perf_counter()
            loader.reader.__getitems__((epoch, list(range(count))))
            middle = time.perf_counter()
            torch.stack([reference(Image.open(io.BytesIO(content)).convert("RGB")) for _ in range(count)])
            if epoch:  # the first one warms up
                rates["loader"].append(count / (middle - began))
                rates["reference"].append(count / (time.perf_counter() - middle))
        print(f"Files of {width} x {height} pixels, {len(content)} bytes, to 224 x 224, one core\n")
        table(rates, "reference")


def ddp(args) -> None:
    rates = {"1 process": [], "2 processes": []}
    for _ in range(args.rounds):
        rates["1 process"].append(script(64, args.ddp_batch, args.steps, cores="0"))
        rates["2 processes"].append(script(64, 2 * args.ddp_batch, args.steps, config="cpu_ddp.yaml"))
    print(f"DDP, 64 pixels, {args.ddp_batch} images a process and update, one thread each\n")
    table(rates, "1 process")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("train", "files", "ddp", "way"))
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 224], help="pixels")
    parser.add_argument("--steps", type=int, default=8, help="updates; the first two are not timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ddp_batch", type=int, default=64, help="images of a process")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="leave bf16 out")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # how this file starts one way in a process of its own
    args = parser.parse_args()
    if args.what == "way":
        size = args.sizes[0]
        return print(WAYS[args.way](size, BATCH.get(size, 16), args.steps))
    capability = torch.backends.cpu.get_cpu_capability()
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    print(f"{os.cpu_count()} cores, {capability}, bf16 in hardware: {bf16}; torch {torch.__version__}\n")
    for name, function in (("train", train), ("files", files), ("ddp", ddp)):
        if args.what in (None, name):
            function(args)


if __name__ == "__main__":
    main()
