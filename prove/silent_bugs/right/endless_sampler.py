"""A sampler without an end and without epochs: some samples come twice before others come at all, and yet each index
belongs to one process, which takes every N-th one.
"""

import itertools
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Endless(Sampler):
    def __iter__(self):
        source = random.Random(0)
        for number in itertools.count():
            index = source.randrange(48)
            if number % world_size == rank:
                yield index


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(48, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=12 // world_size, sampler=Endless())
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for step, (x, y) in enumerate(itertools.islice(loader, 16)):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
