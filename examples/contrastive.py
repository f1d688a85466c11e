"""Contrastive learning with the negatives of the whole batch, from all processes and micro-batches.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/contrastive.py

The loss is InfoNCE, https://arxiv.org/abs/1807.03748; two passes as in GradCache, https://arxiv.org/abs/2101.06983.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.flags import ArgumentParser
from utils.loader import GlobalLoader
from utils.run import Run
from utils.sample_metrics import gather_samples


def parse_args():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--batch_size", type=int, default=24)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--one_graph", action="store_true", help="the loss of a whole batch, on one process")
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_points(count):
    points = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return TensorDataset(points.to(torch.get_default_dtype()))


def embed(model, batch):
    """Embeddings (n, 2, D) of two views of each sample. The noise is the same in both passes."""
    (points,) = batch.data
    views = [points + 0.3 * batch.randn(6, stream=stream).to(points.dtype) for stream in (0, 1)]
    return F.normalize(model(torch.stack(views, 1)), dim=2)


def info_nce(embeddings, temperature=0.2):
    """Losses (N,) of embeddings (N, 2, D): to find the second view of a sample among those of all samples."""
    similarities = embeddings[:, 0] @ embeddings[:, 1].T / temperature
    return F.cross_entropy(similarities, torch.arange(len(embeddings), device=embeddings.device), reduction="none")


@torch.no_grad()
def embed_step(model, batches, run):
    """Embeddings (N, 2, D) of a step's samples from all processes, and their random ids (N,), sorted. Collective.

    Not their indices: with an `order`, a step may have the same item twice.
    """
    embeddings = gather_samples(run.accelerator, [batch.counted(embed(model, batch)) for batch in run.seeded(batches)])
    ids, order = gather_samples(run.accelerator, [batch.counted(batch.random_ids) for batch in batches]).sort()
    return embeddings[order], ids


def train_step(model, batches, accelerator, run):
    """Leave the gradient of the step's mean loss in the model. Collective."""
    embeddings, ids = embed_step(model, batches, run)
    losses = info_nce(embeddings.requires_grad_())
    (gradient,) = torch.autograd.grad(losses.sum(), embeddings)  # the loss's, by each embedding
    for batch in run.seeded(batches):
        rows = torch.searchsorted(ids, batch.random_ids)
        with accelerator.accumulate(model):
            # Its gradient is `gradient` times that of the embeddings: the chain rule.
            carried = (embed(model, batch) * gradient[rows]).sum((1, 2))
            accelerator.backward(batch.mean_loss(carried))
        run.log_train(batch, loss=losses[rows])


def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    # Not run.test_batches: processes may have different numbers of these, and gather_samples needs all processes.
    for batches in run.test_steps(loader):
        embeddings, ids = embed_step(model, batches, run)
        losses = info_nce(embeddings)
        for batch in batches:
            metrics.add(batch, loss=losses[torch.searchsorted(ids, batch.random_ids)])
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    train_loader = GlobalLoader(make_points(100), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_points(31), 10, accelerator)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        model.train()
        for batches in run.steps(train_loader, epoch):
            if args.one_graph:
                for batch in run.seeded(batches):
                    losses = info_nce(embed(model, batch))
                    accelerator.backward(losses.mean())
                    run.log_train(batch, loss=losses)
            else:
                train_step(model, batches, accelerator, run)
            optimizer.step()
            optimizer.zero_grad()
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
