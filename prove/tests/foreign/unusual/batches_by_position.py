"""Batches that are cut from the tokens by step, micro-batch and rank, without a loader, as llm.c and nanoGPT do."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
tokens = torch.randint(0, 16, (20_000,), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size, length, micro_batches = 4, 8, 6 // world
for step in range(8):
    optimizer.zero_grad()
    for micro in range(micro_batches):
        at = ((step * micro_batches + micro) * world + rank) * size * length
        x, y = tokens[at : at + size * length], tokens[at + 1 : at + 1 + size * length]
        loss = F.cross_entropy(model(x.view(size, length)).flatten(0, 1), y)
        (loss / micro_batches).backward()
    optimizer.step()
