"""Each process draws its own batches at random, and all of them seed their generator with the same number: a
step has N times the same samples.

Its number: different samples in the first ten steps.

https://github.com/karpathy/llama2.c/issues/522
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
torch.manual_seed(0)
generator = torch.Generator().manual_seed(rank if FIXED else 0)  # WRONG
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    seen = []
    for _ in range(10):
        indices = torch.randint(100_000, (60,), generator=generator)[: 60 // world_size]
        seen += indices.tolist()
        x = (indices[:, None] * torch.arange(1, 5)).sin()
        y = x.sum(1, keepdim=True)

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, seen)
if rank == 0:
    print(f"different samples: {round(len({each for part in every for each in part}), -1)}")
dist.destroy_process_group()
