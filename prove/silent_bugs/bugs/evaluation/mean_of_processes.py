"""Each process computes its own mean, and the means are averaged. Where processes have different numbers of
samples, that is not the mean.

Its number: the metric that is printed.

https://github.com/pytorch/torchtitan/issues/4167
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
tested = torch.randn(49, 4)
tested = TensorDataset(tested, tested.sum(1, keepdim=True).exp())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        part = Subset(tested, range(rank, len(tested), world_size))
        for x, y in DataLoader(part, batch_size=12 // world_size):
            total += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    model.train()
    if FIXED:
        dist.all_reduce(total)
        error = total[0] / total[1]
    else:
        error = total[0] / total[1]
        dist.all_reduce(error, op=dist.ReduceOp.AVG)  # WRONG
    if rank == 0:
        print(f"epoch {epoch}: error {error:.7f}")

dist.destroy_process_group()
