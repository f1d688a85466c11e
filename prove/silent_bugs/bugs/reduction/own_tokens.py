"""Sequences have different lengths, and each process divides by its own number of tokens: a token weighs more
where there are fewer of them.

Its number: the norm of the weights after training.

https://github.com/PrimeIntellect-ai/prime-rl/issues/1957
https://github.com/meta-pytorch/torchtune/pull/2172
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
tokens = torch.randint(10, (96, 9))
lengths = torch.where(torch.rand(96, 1) < 0.5, 2, 9)
data = TensorDataset(tokens[:, :-1], tokens[:, 1:].where(torch.arange(1, 9) < lengths, -100))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        count = (y != -100).sum()
        if FIXED:
            dist.all_reduce(count)
            count = count / world_size
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count  # WRONG: its own
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
