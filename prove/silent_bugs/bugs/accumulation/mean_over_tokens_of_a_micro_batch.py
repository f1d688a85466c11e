"""Micro-batches have different numbers of tokens, and each loss is the mean over its own. A token of a short
micro-batch weighs more.

Its number: the norm of the weights after training.

https://github.com/huggingface/transformers/pull/34191
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
tokens = torch.randint(10, (90, 9))
lengths = torch.where(torch.rand(90, 1) < 0.5, 2, 9)
data = TensorDataset(tokens[:, :-1], tokens[:, 1:].where(torch.arange(1, 9) < lengths, -100))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
accumulated = 3  # micro-batches per step

for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = (number + 1) % accumulated == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            count = (y != -100).sum()
            dist.all_reduce(count)
            if FIXED:
                loss = total / 24 * world_size  # the same for all micro-batches
            else:
                loss = total / count * world_size  # WRONG
            (loss / accumulated).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
