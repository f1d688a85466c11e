"""Each process augments with a generator that has the same seed everywhere: samples at the same place of all
batches get the same noise, a random number is used N times.

Its number: different random numbers in the first ten steps.

https://github.com/pytorch/pytorch/issues/5059
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
noise = torch.Generator().manual_seed(rank if FIXED else 0)  # WRONG
drawn = []

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        shift = torch.randn(60 // world_size, 1, generator=noise)[: len(x)]
        drawn += shift.flatten().tolist()
        x = x + 0.1 * shift

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, drawn)
if rank == 0:
    print(f"different numbers: {len({each for part in every for each in part})}")
dist.destroy_process_group()
