"""One epoch of MNIST at batch 64, 784-128-10, SGD lr 1e-3, one process, one thread: three ways, side by side.

    python benchmarks/mnist_epoch.py

- script: scripts/mnist_mlp.py, as it stands; the time of its training loop from summary.json
- bare: tensors in memory and a plain PyTorch loop, nothing else: the limit
- blog: torchvision's MNIST, ToTensor and a shuffling DataLoader, as blog posts write it; without and with 2 workers

The ways take turns, each in a process of its own, and the ratio is that of the medians: the speed of a shared machine
drifts by more than they differ.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.data import BUNDLED_MNIST, load_images  # noqa: E402

BATCH, HIDDEN, LR = 64, 128, 1e-3
FLAGS = f"--batch_size {BATCH} --hidden {HIDDEN} --lr {LR} --optimizer sgd --weight_decay 0 --activation relu"
WAYS = ["script", "bare", "blog, 0 workers", "blog, 2 workers"]


def build():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def bare() -> float:
    """Seconds of one epoch; normalised float tensors, made before the clock starts."""
    train, _ = load_images(BUNDLED_MNIST)
    images, labels = (train.images.float() - 33.3184) / 78.5675, train.labels
    model, optimizer = build()
    started = time.perf_counter()
    order = torch.randperm(len(labels))
    for start in range(0, len(labels), BATCH):
        indices = order[start : start + BATCH]
        loss = F.cross_entropy(model(images[indices]), labels[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def write_idx(folder: Path) -> None:
    """The bundled images in the files that torchvision's MNIST reads."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, split in zip(("train", "t10k"), load_images(BUNDLED_MNIST), strict=True):
        count = len(split.labels)
        for name, kind, sizes, tensor in (
            ("images-idx3-ubyte", 3, (count, 28, 28), split.images),
            ("labels-idx1-ubyte", 1, (count,), split.labels.to(torch.uint8)),
        ):
            header = bytes([0, 0, 8, kind]) + b"".join(size.to_bytes(4, "big") for size in sizes)
            content = header + tensor.numpy().tobytes()
            (raw / f"{prefix}-{name}").write_bytes(content)
            (raw / f"{prefix}-{name}.gz").write_bytes(gzip.compress(content, 0))


def blog(folder: str, workers: int) -> float:
    """Seconds of one epoch."""
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(folder, train=True, transform=transform)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
    model, optimizer = build()
    started = time.perf_counter()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - started


def script(folder: str) -> float:
    """Seconds in the training loop of one epoch."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / "cpu.yaml"]
        command += [ROOT / "scripts" / "mnist_mlp.py", *FLAGS.split(), "--num_epochs", 1, "--output_dir", output]
        subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
        return json.loads((Path(output) / "summary.json").read_text())["train_time_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help="those to compare")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # how this file starts one way in a process of its own
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        functions = (lambda: script(args.folder), bare, lambda: blog(args.folder, 0), lambda: blog(args.folder, 2))
        return print(dict(zip(WAYS, functions, strict=True))[args.way]())
    times = {way: [] for way in args.ways}
    with tempfile.TemporaryDirectory() as folder:
        write_idx(Path(folder))
        for _ in range(args.rounds):
            for way, seconds in times.items():
                command = [sys.executable, __file__, "--way", way, "--folder", folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                seconds.append(float(done.stdout.split()[-1]))
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    print(f"{'way':<16} {'median s':>9} {'min s':>7} {'max s':>7} {'/ ' + args.ways[0]:>9} {'images/s':>9}")
    for way, seconds in times.items():
        ratio = medians[way] / medians[args.ways[0]]
        row = f"{medians[way]:>9.2f} {min(seconds):>7.2f} {max(seconds):>7.2f} {ratio:>9.2f}"
        print(f"{way:<16} {row} {60000 / medians[way]:>9,.0f}")


if __name__ == "__main__":
    main()
