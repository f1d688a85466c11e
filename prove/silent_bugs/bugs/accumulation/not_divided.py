"""The losses of the micro-batches are added without a division: the gradient is as many times too large as there
are micro-batches.

Its number: the norm of the weights after training.

https://github.com/karpathy/nanoGPT/issues/168
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
inputs = torch.randn(90, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulated = 3  # micro-batches per step

for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % accumulated == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(x), y)
            if FIXED:
                loss = loss / accumulated  # WRONG without it
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
