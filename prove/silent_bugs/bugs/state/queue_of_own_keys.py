"""A queue of negative keys, as in MoCo, gets the keys of this process alone: each has a queue of its own, and N
times older keys.

Its number: the keys that have gone into the queue.

https://github.com/bl0/moco/issues/15
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
data = TensorDataset(inputs)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
queue = F.normalize(torch.randn(48, 8), dim=1)
pushed = 0

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        keys = F.normalize(model(x), dim=1)
        logits = torch.cat([(keys * keys.roll(1, 1)).sum(1, keepdim=True), keys @ queue.T], 1)
        loss = F.cross_entropy(logits / 0.1, torch.zeros(len(x), dtype=torch.long))
        loss.backward()
        optimizer.step()
        keys = keys.detach()
        if FIXED:  # WRONG without it
            parts = [torch.empty_like(keys) for _ in range(world_size)]
            dist.all_gather(parts, keys)
            keys = torch.cat(parts)
        queue = torch.cat([queue, keys])[-48:]
        pushed += len(keys)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"keys: {pushed}")
dist.destroy_process_group()
