"""cross_entropy with class weights divides by the weights of the samples at hand. Each process has other classes
in its part, so that the mean of these means is not the loss of the batch.

Its number: the norm of the weights after training.

https://github.com/pytorch/pytorch/issues/31579
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
data = TensorDataset(inputs, (inputs.sum(1) > 1).long())
weight = torch.tensor([1.0, 9.0])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        if FIXED:
            total = weight[y].sum()
            dist.all_reduce(total)
            loss = F.cross_entropy(model(x), y, weight, reduction="sum") / total * world_size
        else:
            loss = F.cross_entropy(model(x), y, weight)  # WRONG
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
