"""The MNIST program of a post, alone and with DDP.

    python benchmarks/program_of_a_post.py

Many posts train this model on two processes and find it worse: 784-128-10 with ReLU, SGD with a learning rate of 0.001,
two epochs in batches of 64, images from 0 to 1, seed 0.

- program of a post: DistributedDataParallel and a DistributedSampler. Its DataLoader reads 64 images per process, so
  two processes take half as many steps
- this project's loop: the same model, optimizer and data in the loop of mnist_mlp.py. 64 images per step, over
  all processes; with 128, one process takes the steps of the post's two

The last column compares the loss of each step with the loss on one process: the largest relative difference.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.transforms import ConvertImageDtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp

POST, OURS = "program of a post", "this project's loop"


def parse_args():
    parser = common.make_parser(__doc__, dataset=True)
    parser.add_argument("--num_epochs", type=common.positive_int, default=2, help="of each run (%(default)s)")
    parser.add_argument("--batch_size", type=common.positive_int, default=64, help="of a step (%(default)s)")
    parser.add_argument("--program", choices=(POST, OURS), help=argparse.SUPPRESS)
    return parser.parse_args()


def load(dataset: str) -> list[TensorDataset]:
    """The images of training and test as ToTensor makes them, and their labels."""
    splits = mnist_mlp.load_images(dataset)
    return [TensorDataset(images / 255, labels) for images, labels in (split.tensors for split in splits)]


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def post(args) -> dict:
    """Train with DDP; each process tests on the whole test set."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    train_data, test_data = load(args.dataset)
    sampler = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, batch_size=1000)
    model, optimizer = make_model()
    model = DistributedDataParallel(model)
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return {"steps": args.num_epochs * len(train_loader), "accuracy": correct / len(test_data)}


def make_model_of_bytes(*sizes) -> nn.Module:
    return nn.Sequential(ConvertImageDtype(torch.float32), make_model()[0])


def ours(args) -> dict:
    """Train in `main` of scripts/mnist_mlp.py."""
    schedules = torch.optim.lr_scheduler
    with (
        mock.patch.object(mnist_mlp, "MLP", make_model_of_bytes),
        mock.patch.object(mnist_mlp, "TEST_BATCH_SIZE", 1000),
        mock.patch.object(torch.optim, "AdamW", lambda parameters, lr, **_: torch.optim.SGD(parameters, lr)),
        mock.patch.object(schedules, "OneCycleLR", lambda optimizer, *_, **__: schedules.ConstantLR(optimizer, 1.0)),
    ):
        flags = ["--dataset", args.dataset, "--num_epochs", args.num_epochs, "--batch_size", args.batch_size]
        summary, lines = common.run_script("mnist_mlp", *flags, "--lr", 0.001, "--log_every", 1)
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    return {"steps": summary["step"], "accuracy": summary["test_accuracy"], "losses": losses} if summary else {}


def worker(args) -> dict:
    return post(args) if args.program == POST else ours(args)


def measure(args) -> list:
    """Program, processes, batch size, steps, test accuracy, and the difference of the losses to one process."""
    runs = [(program, processes, args.batch_size) for program in (POST, OURS) for processes in (1, 2)]
    runs.append((OURS, 1, 2 * args.batch_size))
    rows = []
    for program, processes, batch_size in runs:
        print(f"{program}, {processes} at once", file=sys.stderr, flush=True)
        flags, launch_flags = ["--batch_size", batch_size, "--program", program], ["--num_processes", processes]
        result = common.launch_workers("cpu_ddp", __file__, *flags, launch_flags=launch_flags)
        difference = None
        if processes == 1:
            alone = result.get("losses")
        elif program == OURS:
            losses = zip(result["losses"], alone, strict=True)
            difference = max(abs(loss - base) / base for loss, base in losses)
        rows.append([program, processes, batch_size, result["steps"], result["accuracy"], difference])
    return rows


def report(measured) -> list[str]:
    columns = {"program": "{}", "processes": "{}", "batch_size": "{}", "steps": "{}", "test accuracy": "{:.2%}"}
    return [common.table(columns | {"difference to 1 process": "{:.1e}"}, measured)]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
