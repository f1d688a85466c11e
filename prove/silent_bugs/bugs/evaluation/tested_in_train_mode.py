"""model.eval() is missing before the test: dropout is on, and the metric is random.

Its number: the same metric, measured twice: the difference.

https://github.com/pytorch/tutorials/issues/1624
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
tested = torch.randn(50, 4)
tested = TensorDataset(tested, tested.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if FIXED:
        model.eval()  # WRONG without it
    errors = []
    for _ in range(2):
        with torch.no_grad():
            part = Subset(tested, range(rank, len(tested), world_size))
            total = torch.tensor([F.mse_loss(model(x), y, reduction="sum") for x, y in DataLoader(part, 5)]).sum()
        dist.all_reduce(total)
        errors.append(total.item() / len(tested))
    model.train()
    if rank == 0:
        print(f"epoch {epoch}: error {errors[0]:.4f}, again; difference {abs(errors[0] - errors[1]):.4f}")

dist.destroy_process_group()
