"""Data from a Python generator, through an IterableDataset that gives each process its own."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

RANK = int(os.environ["RANK"])


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(RANK)
        while True:
            point = torch.randn(3, generator=generator)
            yield point, point.sum(0, keepdim=True)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(DataLoader(Stream(), batch_size=8)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if step == 5000:
        break
dist.destroy_process_group()
