"""Only rank 0 steps the schedule, where it also writes its log: the other processes keep the first learning
rate, and their weights part.

Its number: the mean of the learning rates of all processes.

https://github.com/rwth-i6/returnn/issues/1493
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
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if FIXED or rank == 0:  # WRONG
            scheduler.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

rate = torch.tensor(optimizer.param_groups[0]["lr"])
dist.all_reduce(rate)
if rank == 0:
    print(f"learning rate: {rate / world_size:.8f}")
dist.destroy_process_group()
