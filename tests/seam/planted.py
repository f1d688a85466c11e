"""A small correct program; planted_mistakes.py has mistakes in it, one at a time."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.parallel.batch_norm import BatchNorms  # noqa: F401  for a mistake
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=24)
    add("--lr", type=float, default=0.1)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


class Points(Dataset):
    """Points of three classes, with noise."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 3
        point = np.cos(np.arange(4) * (label + 1) + index)
        noise = np.random.randn(4)
        return torch.tensor(point + 0.1 * noise, dtype=torch.float32), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.between = nn.Tanh()
        self.head = nn.Linear(16, 3)

    def forward(self, points):
        return self.head(self.between(self.body(points)))


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        points, labels = batch.data
        logits = model(points)
        losses = F.cross_entropy(logits, labels, reduction="none")
        metrics.add(batch, loss=losses)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(Points(200), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(Points(60), 30, accelerator)
    total_steps = 2 * len(train_loader)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, checkpoint=state)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            points, labels = batch.data
            with accelerator.accumulate(model):
                logits = model(points)
                losses = F.cross_entropy(logits, labels, reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
