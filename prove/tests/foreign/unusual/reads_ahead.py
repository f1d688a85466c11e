"""Reads all micro-batches of a step ahead, and counts on over epochs; the prepared model is in another module."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2


class WeighedLoss(nn.Module):
    """Each sample has a weight of its own, as time steps have."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        losses = F.mse_loss(self.model(batch["points"]).flatten(), batch["targets"], reduction="none")
        return (losses * batch["points"][:, 0].abs()).mean()


def endless(loader):
    while True:
        yield from loader


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    points = torch.randn(200, 4)
    loader = DataLoader(TensorDataset(points, points.sum(1)), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss, batches = WeighedLoss(model), endless(loader)
    for _ in range(30):
        micro_batches = [dict(zip(("points", "targets"), next(batches), strict=True)) for _ in range(ACCUMULATION)]
        for batch in micro_batches:
            moved = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            accelerator.backward(loss(moved) / ACCUMULATION)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
