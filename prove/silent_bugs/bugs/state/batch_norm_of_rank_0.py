"""BatchNorm's running statistics are the ones of rank 0's samples: DistributedDataParallel copies them to all
processes before each step, and what the others have seen is lost.

Its number: the norm of the running mean.

https://github.com/mlcommons/training/issues/289
https://github.com/pytorch/pytorch/issues/13711
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
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
norm = nn.BatchNorm1d(4)
model = DistributedDataParallel(nn.Sequential(norm, nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if FIXED:  # WRONG without it
            dist.all_reduce(norm.running_mean, op=dist.ReduceOp.AVG)
            dist.all_reduce(norm.running_var, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"norm of the running mean: {norm.running_mean.norm():.7f}")
dist.destroy_process_group()
