"""Batches are cut from shards of tokens by position, each process at its own. At the end of a shard all of them go to
the start of the next one, and read the same tokens from there on.

Its number: the norm of the weights after training.

https://github.com/karpathy/build-nanogpt/pull/26
https://github.com/karpathy/build-nanogpt/pull/100
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
B, T = 12 // world_size, 8
shards = [torch.randint(0, 16, (4 * 12 * T + 1,), generator=generator) for _ in range(3)]


class Shards:
    def __init__(self):
        self.shard, self.position = 0, rank * B * T

    def next_batch(self):
        part = shards[self.shard][self.position : self.position + B * T + 1]
        self.position += world_size * B * T
        if self.position + B * T + 1 > len(shards[self.shard]):
            self.shard = (self.shard + 1) % len(shards)
            self.position = rank * B * T if FIXED else 0  # WRONG
        return part[:-1].view(B, T), part[1:].view(B, T)


torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Tanh(), nn.Linear(8, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
train = Shards()
for step in range(10):
    x, y = train.next_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
