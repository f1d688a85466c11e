"""An IterableDataset knows nothing of processes. Each of them reads the whole stream, and trains on the same
samples.

Its number: how often the first sample of the stream is trained on in an epoch.

https://github.com/huggingface/datasets/issues/5360
https://github.com/Lightning-AI/pytorch-lightning/issues/15734
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

FIXED = "--fixed" in sys.argv


class Stream(IterableDataset):
    def __iter__(self):
        points = torch.linspace(-1, 1, 96)
        return iter(points[rank::world_size] if FIXED else points)  # WRONG


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
loader = DataLoader(Stream(), batch_size=12 // world_size)
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    count = torch.tensor(0)
    for points in loader:
        count += (points == -1).sum()
        x = points[:, None]
        y = x.square()

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

dist.all_reduce(count)
if rank == 0:
    print(f"the first sample was trained on {count} times")
dist.destroy_process_group()
