"""Reads all micro-batches of a step ahead, and counts on over epochs. DDP is inside of another module."""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATION = 2


class WeighedLoss(nn.Module):
    """Each sample has a weight of its own, as time steps have."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        losses = F.mse_loss(self.model(batch["points"]).flatten(), batch["targets"], reduction="none")
        return (losses * batch["points"][:, 0].abs()).mean()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    loss = WeighedLoss(model)
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    points = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, points.sum(1))
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    loader = DataLoader(data, 16, sampler=sampler, shuffle=sampler is None)

    def epochs():
        for epoch in itertools.count():
            if sampler is not None:
                sampler.set_epoch(epoch)
            yield from loader

    batches = epochs()
    for _ in range(30):
        micro_batches = [dict(zip(("points", "targets"), next(batches), strict=True)) for _ in range(ACCUMULATION)]
        for batch in micro_batches:
            (loss(batch) / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
