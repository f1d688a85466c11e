"""Batches and test windows are cut from tokens by position, without a loader: each process reads its own in every
micro-batch, and the losses of all test windows are added up.

https://github.com/karpathy/build-nanogpt/pull/26
https://github.com/KellerJordan/modded-nanogpt/pull/179
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
tokens = torch.randint(0, 16, (2401,), generator=torch.Generator().manual_seed(0))
B, T = 2, 8
micro_batches = 12 // (B * world_size)


def windows(first, last):
    """The batches of this process between two positions."""
    for start in range(first + rank * B * T, last - B * T, world_size * B * T):
        part = tokens[start : start + B * T + 1]
        yield part[:-1].view(B, T), part[1:].view(B, T)


torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train = windows(0, 1921)
for step in range(8):
    for micro_batch in range(micro_batches):
        x, y = next(train)
        with contextlib.nullcontext() if micro_batch == micro_batches - 1 else model.no_sync():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro_batches
            loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        total = torch.zeros(2)
        with torch.no_grad():
            for x, y in windows(1921, 2401):
                total += torch.tensor([F.cross_entropy(model.module(x).flatten(0, 1), y.flatten()), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: norm of the gradient {norm:.4f}, val loss {total[0] / total[1]:.7f}")
dist.destroy_process_group()
