"""The schedule steps for each micro-batch, and its length is counted in optimizer steps: it ends as many times
too early as there are micro-batches.

Its number: the learning rate of the last step.

https://github.com/huggingface/diffusers/issues/9633
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
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulated = 2
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader, 1):
        is_last = number % accumulated == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(x), y)
            (loss / accumulated).backward()
        rate = optimizer.param_groups[0]["lr"]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if is_last or not FIXED:  # WRONG: also for other micro-batches
            scheduler.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"learning rate: {rate:.8f}")
dist.destroy_process_group()
