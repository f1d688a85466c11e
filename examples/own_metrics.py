"""Metrics of torchmetrics that are neither means nor counts, exact on any number of processes.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/own_metrics.py

Needs `pip install torchmetrics`.
"""

import sys
from pathlib import Path

import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run
from utils.sample_metrics import gather_samples

CLASSES = 3


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=40)
    add("--lr", type=float, default=1e-2)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=2)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_points(count):
    """Points of three overlapping clouds, and the number of the cloud."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(noise + torch.stack([labels, labels % 2], dim=1), labels)


class OverAllSamples:
    """Any torchmetrics Metric, over all samples of a test in the order of the dataset; a new one for each test."""

    def __init__(self, metric, accelerator):
        self.metric, self.accelerator, self.parts = metric.to(accelerator.device), accelerator, []
        self.metric.sync_on_compute = False  # each process gets all samples

    def update(self, batch, *tensors):
        self.parts.append([batch.counted(tensor) for tensor in (batch.indices, *tensors)])

    def compute(self):
        """Collective."""
        columns = zip(*self.parts, strict=True)
        indices, *columns = [gather_samples(self.accelerator, list(column)) for column in columns]
        order = indices.argsort()
        self.metric.update(*(column[order] for column in columns))
        return self.metric.compute()


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    own = {
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=CLASSES),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro"),
        "calibration": torchmetrics.CalibrationError(task="multiclass", num_classes=CLASSES),
    }
    own = {name: OverAllSamples(metric, run.accelerator) for name, metric in own.items()}
    for batch in run.test_batches(loader):
        points, labels = batch.data
        logits = model(points)
        metrics.add(batch, loss=F.cross_entropy(logits, labels, reduction="none"))
        for metric in own.values():
            metric.update(batch, logits.softmax(1), labels)
    return metrics.reduce() | {name: metric.compute().item() for name, metric in own.items()}


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(make_points(200), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_points(77), 25, accelerator)  # the last batch has 2 samples
    total_steps = args.num_epochs * len(train_loader)

    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            points, labels = batch.data
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(points), labels, reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
