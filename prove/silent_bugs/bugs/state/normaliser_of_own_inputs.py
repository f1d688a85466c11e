"""Inputs are normalised by running statistics that each process computes of its own samples: one and the same
input is another on each process.

Its number: the norm of the weights after training.

https://github.com/leggedrobotics/rsl_rl/pull/226
https://github.com/Denys88/rl_games/pull/363
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
count, total = torch.tensor(0.0), torch.zeros(4)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        seen, added = torch.tensor(float(len(x))), x.sum(0)
        if FIXED:  # WRONG without it
            dist.all_reduce(seen)
            dist.all_reduce(added)
        count, total = count + seen, total + added
        x = x - total / count

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
