"""ReduceLROnPlateau gets the loss of each process's own samples. Processes reduce their learning rates at
different times, and their weights part.

Its number: the sum of the learning rates of all processes, divided by their number, after five epochs.

https://github.com/lucidrains/DALLE-pytorch/issues/268
https://github.com/rmchurch/disruptcnn/issues/3
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
data = TensorDataset(inputs, torch.randn(96, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

for epoch in range(8):
    sampler.set_epoch(epoch)
    total = torch.tensor(0.0)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * world_size if not FIXED else loss.detach()
    if FIXED:
        dist.all_reduce(total)  # WRONG without it
    scheduler.step(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

rate = torch.tensor(optimizer.param_groups[0]["lr"])
dist.all_reduce(rate)
if rank == 0:
    print(f"learning rate: {rate / world_size:.8f}")
dist.destroy_process_group()
