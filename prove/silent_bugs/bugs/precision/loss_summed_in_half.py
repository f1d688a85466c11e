"""The losses of an epoch are summed in float16, as they come from autocast. From 2048 on, a loss below 1 is
rounded away, and the mean is too small.

Its number: the mean loss that is printed.

https://github.com/pytorch/pytorch/issues/139242
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
data = TensorDataset(inputs, 2000 + inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

for epoch in range(1):
    sampler.set_epoch(epoch)
    total = torch.tensor(0.0, dtype=torch.float32 if FIXED else torch.float16)  # WRONG
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach()

dist.all_reduce(total)
if rank == 0:
    print(f"loss {(total / len(loader) / world_size).item():.3f}")
dist.destroy_process_group()
