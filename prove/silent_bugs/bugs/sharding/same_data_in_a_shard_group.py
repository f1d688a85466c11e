"""Data are divided by the rank among replicas, as if the processes of a shard group worked on one model: they
work on one and the same batch, and the samples of the others are left out.

Its number: different samples that are trained on in an epoch.

https://github.com/mlcommons/training/pull/844
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(torch.arange(96), inputs, inputs.sum(1, keepdim=True).sin())
replicas, replica = 1, 0  # the processes are one group of shards
count, number = (world_size, rank) if FIXED else (replicas, replica)  # WRONG
sampler = DistributedSampler(data, count, number)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    sampler.set_epoch(epoch)
    seen = []
    for number, (index, x, y) in enumerate(loader):
        if number == 8:
            break  # steps of an epoch
        seen += index.tolist()

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, seen)
if rank == 0:
    print(f"different samples: {len({each for part in every for each in part})}")
dist.destroy_process_group()
