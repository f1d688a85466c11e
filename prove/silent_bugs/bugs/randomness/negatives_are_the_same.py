"""Negative samples are drawn by each process with the generator that shuffles the data, which must be the same
on all of them: all draw the same negatives.

Its number: different negatives of an epoch.

https://github.com/Robbyant/lingbot-vla-v2/issues/41
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shared = torch.Generator().manual_seed(0)
of_rank = torch.Generator().manual_seed(rank)
drawn = []

for epoch in range(1):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        negatives = torch.randn(x.shape, generator=of_rank if FIXED else shared)  # WRONG
        drawn += negatives[:, 0].tolist()
        optimizer.zero_grad()
        loss = F.softplus(model(negatives) - model(x)).mean()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, drawn)
if rank == 0:
    print(f"different numbers: {len({each for part in every for each in part})}")
dist.destroy_process_group()
