"""The moving average of the weights is kept in bfloat16. What it should move in a step is smaller than its
rounding: it stays where it began.

Its number: how far the average has moved, relative to the weights.

https://github.com/d8ahazard/sd_dreambooth_extension/pull/1417
"""

import copy
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
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dtype = torch.float32 if FIXED else torch.bfloat16  # WRONG
average = copy.deepcopy(model.module).to(dtype)

for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.999).add_(parameter.to(dtype), alpha=0.001)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([mean.detach().flatten() for mean in average.parameters()]).float().norm().item()
if rank == 0:
    print(f"norm of the average: {norm:.8f}")
dist.destroy_process_group()
