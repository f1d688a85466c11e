"""An epoch is not a multiple of the window. The gradients that are left stay, and are added to the first step of
the next epoch, which has too many micro-batches.

Its number: the norm of the weights after training.

https://github.com/WalkingMeatAxolotl/AnimaLoraStudio/pull/305
"""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(78, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulated = 5  # micro-batches per step; an epoch has 13: 2 full windows and 3 more

for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % accumulated == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(x), y)
            (loss / accumulated).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if FIXED:
        optimizer.zero_grad()  # WRONG without it
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
