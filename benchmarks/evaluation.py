"""Evaluation against training's forward pass.

    python benchmarks/evaluation.py

Images/s of the scripts' `evaluate`, with all that it counts, over MNIST's test images (ResNet-50: over 512 random
images of 64 x 64 pixels); of the forward pass alone as training has it, with autograd on, at the script's default
batch, over as many images; and for MNIST of the test of blog posts, with torchvision's loader at batch 1000. One
process, in turns.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp, resnet50
from utils.data import BUNDLED_MNIST, GlobalBatches, GlobalSampler
from utils.images import SyntheticLoader


def parse_args():
    return common.make_parser(__doc__, rounds=8).parse_args()


class NoSignal:
    def agreed(self) -> bool:
        return False


def images_per_s(images: int, work) -> float:
    began = time.perf_counter()
    work()
    return images / (time.perf_counter() - began)


def forward(model, batches) -> None:
    model.train()
    for batch in batches:
        losses = model(batch.images, batch.labels)[0]
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


def measure(args) -> dict:
    from accelerate import Accelerator
    from torchvision import datasets, transforms

    accelerator, threads = Accelerator(cpu=common.device().type == "cpu"), torch.get_num_threads()
    device, measured = accelerator.device, {}

    torch.set_num_threads(1)
    _, test = mnist_mlp.load_images(BUNDLED_MNIST)
    model = mnist_mlp.MLP(784, 192, 10).to(device)
    test_batches = GlobalBatches(test, mnist_mlp.TEST_BATCH_SIZE, accelerator)
    train_batches = GlobalBatches(test, 256, accelerator, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        common.write_idx(Path(folder))
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        loader = torch.utils.data.DataLoader(datasets.MNIST(folder, train=False, transform=transform), 1000)
        plain = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(784, 192), torch.nn.SiLU(), torch.nn.Linear(192, 10)
        )
        plain.to(device)
        works = {
            "evaluate": lambda: mnist_mlp.evaluate(model, test_batches, accelerator, NoSignal()),
            "training's forward": lambda: forward(model, train_batches.epoch()),
            "blog's test": lambda: blog(plain, loader),
        }
        measured["MNIST"] = take_turns(works, len(test.labels), args.rounds)

    torch.set_num_threads(threads)
    images, model = 512, resnet50.ResNet50(1000).to(device, memory_format=torch.channels_last)
    loader = SyntheticLoader(images, 64, accelerator)
    test_sampler = GlobalSampler(loader.labels, resnet50.TEST_BATCH_SIZE, accelerator)
    train_sampler = GlobalSampler(loader.labels, 64, accelerator, seed=0)
    works = {
        "evaluate": lambda: resnet50.evaluate(model, loader.load(test_sampler.pieces()), accelerator, NoSignal()),
        "training's forward": lambda: forward(model, loader.load(train_sampler.pieces())),
    }
    measured["ResNet-50"] = take_turns(works, images, max(1, args.rounds // 2))
    return measured


def take_turns(works, images: int, rounds: int) -> dict[str, list[float]]:
    ways = {way: lambda work=work: images_per_s(images, work) for way, work in works.items()}
    common.take_turns(ways, 1)  # warm-up
    return common.take_turns(ways, rounds)


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "median images/s": "{:,.0f}", "min": "{:,.0f}", "max": "{:,.0f}"}
    columns["/ training's forward"] = "{:.2f}"
    rows, bars, goals = [], [], []
    for run, ways in measured.items():
        medians = {way: statistics.median(rates) for way, rates in ways.items()}
        ratios = {way: median / medians["training's forward"] for way, median in medians.items()}
        rows += [[run, way, medians[way], min(rates), max(rates), ratios[way]] for way, rates in ways.items()]
        bars.append(common.Bars(f"{run}: evaluation / training's forward", ratios, goal=1, at_least=True))
        goals.append(
            common.Goal(
                f"Evaluation of {run} against training's forward", ratios["evaluate"], 1, "{:.2f} x as fast", True
            )
        )
    return common.Report([common.table(columns, rows)], bars, goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
