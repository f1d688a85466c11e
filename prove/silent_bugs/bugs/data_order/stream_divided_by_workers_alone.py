"""A stream is divided over the workers of its DataLoader, and not over the processes, so that all processes read
the same samples.

Its number: different samples of an epoch.

https://github.com/huggingface/datasets/issues/3423
https://github.com/huggingface/datasets/issues/6594
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIXED = "--fixed" in sys.argv


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        part, parts = worker.id, worker.num_workers
        if FIXED:  # WRONG without it
            part, parts = part + rank * parts, parts * world_size
        return iter(torch.linspace(-1, 1, 96)[part::parts][: 96 // 2 // world_size])


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
loader = DataLoader(Stream(), batch_size=4, num_workers=2, multiprocessing_context="fork")
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    seen = []
    for points in loader:
        seen += points.tolist()
        x = points[:, None]
        y = x.square()

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, seen)
if rank == 0:
    print(f"different samples: {len({each for part in every for each in part})}")
dist.destroy_process_group()
