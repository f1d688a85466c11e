"""Classify series of different lengths, three classes of which one is rare, in an order of your own.

accelerate launch --config_file accelerate_configs/cpu.yaml examples/orders.py --order balanced
accelerate launch --config_file accelerate_configs/cpu_ddp.yaml examples/orders.py --order similar_length
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.flags import ArgumentParser, positive_int
from utils.launch import make_accelerator
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--order", choices=("balanced", "several_per_class", "similar_length", "in_windows"), default="balanced")
    add("--batch_size", type=positive_int, default=48, help="samples per step, over all processes")
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=positive_int, default=2)
    add("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step")
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


# An order is a function of the epoch that returns indices. It draws from the global generator, which is seeded by
# (seed, epoch) before each call, so each process gets the same order, and so does a resumed run.


def balanced(labels):
    """Oversampling: each class is drawn equally often, on average."""
    weights = 1 / labels.bincount()[labels]
    return lambda epoch: torch.multinomial(weights, len(labels), replacement=True)


def several_per_class(labels, count):
    """Groups of `count` samples of one class; those that fill no group are left out of this epoch."""

    def order(epoch):
        groups = []
        for label in labels.unique():
            indices = (labels == label).nonzero()[:, 0]
            indices = indices[torch.randperm(len(indices))]
            groups += indices[: len(indices) // count * count].split(count)
        return torch.cat([groups[number] for number in torch.randperm(len(groups))])

    return order


def similar_length(lengths, batch_size):
    """Batches of samples of similar length, in random order; the smaller last batch has any lengths."""
    whole = len(lengths) // batch_size * batch_size

    def order(epoch):
        indices = torch.randperm(len(lengths))
        indices, rest = indices[:whole], indices[whole:]
        batches = indices[lengths[indices].argsort(stable=True)].view(-1, batch_size)
        return torch.cat([batches[torch.randperm(len(batches))].flatten(), rest])

    return order


def in_windows(length, window, blocks=64):
    """Windows of as many blocks of neighbours, in random order: what is read at a time lies in few places of a disk."""
    size = -(-window // blocks)

    def order(epoch):
        starts = (torch.randperm(-(-length // size)) * size).split(blocks)
        windows = [torch.cat([torch.arange(start, min(start + size, length)) for start in part]) for part in starts]
        return torch.cat([items[torch.randperm(len(items))] for items in windows])

    return order


def make_series(count, seed):
    """Pairs of a series (length, 2) and its class, which sets the direction in which the series moves."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True, generator=generator)
    drift = 0.1 * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    series = []
    for label in labels:
        length = int(torch.randint(5, 40, (), generator=generator))
        series.append((torch.randn(length, 2, generator=generator) + drift[label]).cumsum(0))
    return list(zip(series, labels, strict=True))


def pad(items):
    """Padded series (n, longest, 2), lengths (n,) and labels (n,)."""
    series, labels = zip(*items, strict=True)
    return pad_sequence(series, batch_first=True), torch.tensor([len(one) for one in series]), torch.stack(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, series, lengths):
        is_real = torch.arange(series.shape[1], device=series.device) < lengths[:, None]
        features = self.body(series.to(self.head.weight.dtype)) * is_real[..., None]
        return self.head(features.sum(1) / lengths[:, None])


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        series, lengths, labels = batch.data
        logits = model(series, lengths)
        metrics.add(batch, loss=F.cross_entropy(logits, labels, reduction="none"), accuracy=logits.argmax(1) == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_data, test_data = make_series(400, 0), make_series(101, 1)
    labels = torch.stack([label for _, label in train_data])
    lengths = torch.tensor([len(series) for series, _ in train_data])
    orders = {
        "balanced": balanced(labels),
        "several_per_class": several_per_class(labels, 4),
        "similar_length": similar_length(lengths, args.batch_size),
        "in_windows": in_windows(len(train_data), 128),
    }
    options = {"seed": args.seed, "order": orders[args.order], "collate_fn": pad}
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, **options)
    test_loader = GlobalLoader(test_data, 50, accelerator, collate_fn=pad)

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpoint = {"model": model, "optimizer": optimizer}
    run.start(train_loader, test_loader, args.num_epochs * len(train_loader), checkpoint=checkpoint)
    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            series, lengths, labels = batch.data
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(series, lengths), labels, reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, rare=labels == 2)  # rare: fraction of the rare class
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
