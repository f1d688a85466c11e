"""Advantages are normalised by the mean and deviation of this process's part of the batch. With more processes,
parts are smaller, and the weights of the samples differ.

Its number: the norm of the weights after training.

https://github.com/HorizonRobotics/alf/pull/1642
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
data = TensorDataset(inputs, torch.randint(2, (96,)), torch.randn(96))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, action, advantage in loader:
        optimizer.zero_grad()
        every = advantage
        if FIXED:  # WRONG without it
            every = [torch.empty_like(advantage) for _ in range(world_size)]
            dist.all_gather(every, advantage)
            every = torch.cat(every)
        advantage = (advantage - every.mean()) / every.std()
        loss = (advantage * F.cross_entropy(model(x), action, reduction="none")).mean()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
