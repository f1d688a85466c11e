"""Evaluation against training's forward pass.

    python benchmarks/evaluation.py

Images/s of the scripts' `evaluate`, with all that it counts, over MNIST's test images (ResNet-50: over 512 random
images of 64 x 64 pixels); of the forward pass alone as in training, with autograd on, at the script's default batch
size, over as many images; and for MNIST of the test of blog posts, with torchvision's loader at batch size 1000. One
process, in turns.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.accelerate_share import mnist_losses, resnet50_losses
from scripts import mnist_mlp, resnet50
from utils.datasets.image_files import SyntheticImages
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = common.make_parser(__doc__, rounds=8, dataset=True)
    parser.add_argument("--images", type=common.positive_int, default=512, help="of ResNet-50 (%(default)s)")
    return parser.parse_args()


def start_run(accelerator, folder: Path, loader, test_loader) -> Run:
    """A Run in which `evaluate` can test; it prints nothing."""
    run = Run(accelerator, argparse.Namespace(output_dir=folder))
    with contextlib.redirect_stdout(io.StringIO()):
        run.start(loader, test_loader, len(loader), checkpoint={})
    return run


def forward(compute_losses, model, batches) -> None:
    model.train()
    for batch in batches:
        losses = compute_losses(model, *batch.data)
    losses.sum().item()  # a GPU is done only now


@torch.no_grad()
def blog(model, loader) -> None:
    model.eval()
    loss = correct = 0
    for images, labels in loader:
        images, labels = images.to(common.device()), labels.to(common.device())
        logits = model(images)
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(1) == labels).sum().item()


def images_per_s(works: dict, images: int, rounds: int) -> dict[str, list[float]]:
    def rate(work) -> float:
        began = time.perf_counter()
        work()
        return images / (time.perf_counter() - began)

    ways = {way: lambda work=work: rate(work) for way, work in works.items()}
    common.take_turns(ways, 1)  # warm-up
    return common.take_turns(ways, rounds)


def measure(args) -> dict:
    accelerator = Accelerator(cpu=common.device().type == "cpu")
    with tempfile.TemporaryDirectory() as folder:
        with common.threads(1):
            mnist = measure_mnist(accelerator, Path(folder), args)
        return {"MNIST": mnist, "ResNet-50": measure_resnet50(accelerator, Path(folder), args)}


def measure_mnist(accelerator, folder: Path, args) -> dict[str, list[float]]:
    from torchvision import datasets, transforms

    _, test_data = mnist_mlp.load_images(args.dataset)
    model = mnist_mlp.MLP(784, 192, len(test_data.classes)).to(accelerator.device)
    train_loader = GlobalLoader(test_data, 256, accelerator, seed=0)
    test_loader = GlobalLoader(test_data, mnist_mlp.TEST_BATCH_SIZE, accelerator)
    run = start_run(accelerator, folder / "mnist", train_loader, test_loader)

    common.write_idx(folder, args.dataset)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(folder, train=False, transform=transform)
    layers = torch.nn.Flatten(), torch.nn.Linear(784, 192), torch.nn.SiLU(), torch.nn.Linear(192, 10)
    plain, blog_loader = torch.nn.Sequential(*layers), torch.utils.data.DataLoader(dataset, 1000)
    plain.to(accelerator.device)
    works = {
        "evaluate": lambda: mnist_mlp.evaluate(model, test_loader, run),
        "training's forward": lambda: forward(mnist_losses, model, train_loader),
        "blog's test": lambda: blog(plain, blog_loader),
    }
    return images_per_s(works, len(test_data), args.rounds)


def measure_resnet50(accelerator, folder: Path, args) -> dict[str, list[float]]:
    data = SyntheticImages(args.images, 64, accelerator.device)
    num_classes = len(data.classes)
    model = torchvision.models.resnet50(num_classes=num_classes)
    model.to(accelerator.device, memory_format=torch.channels_last)
    train_loader = GlobalLoader(data, min(64, args.images), accelerator, seed=0, collate_fn=data.collate)
    test_loader = GlobalLoader(data, resnet50.TEST_BATCH_SIZE, accelerator, collate_fn=data.collate)
    run = start_run(accelerator, folder / "resnet50", train_loader, test_loader)
    works = {
        "evaluate": lambda: resnet50.evaluate(model, test_loader, run, num_classes),
        "training's forward": lambda: forward(resnet50_losses, model, train_loader),
    }
    return images_per_s(works, len(data), max(1, args.rounds // 2))


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "median images/s": "{:,.0f}"}
    columns |= {"min": "{:,.0f}", "max": "{:,.0f}", "/ training's forward": "{:.2f}"}
    rows, bars, goals = [], [], []
    for run, ways in measured.items():
        medians = common.medians(ways)
        ratios = {way: median / medians["training's forward"] for way, median in medians.items()}
        rows += [[run, way, medians[way], min(rates), max(rates), ratios[way]] for way, rates in ways.items()]
        bars.append(common.Bars(f"{run}: evaluation / training's forward", ratios, goal=1, at_least=True))
        what = f"Evaluation of {run} against training's forward"
        goals.append(common.Goal(what, ratios["evaluate"], 1, "{:.2f} x as fast", at_least=True))
    return common.Report([common.table(columns, rows)], bars, goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
