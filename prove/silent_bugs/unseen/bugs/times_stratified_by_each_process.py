"""The times of a diffusion are spread evenly over the batch, from an offset that is drawn in each step. Each process
draws the same offset for its own rows: the samples at one place have the same time on all of them.

Its number: different times that were trained on.

https://github.com/facebookresearch/tuna-2/issues/15
https://github.com/ohayonguy/PMRF/issues/15
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
offsets = torch.Generator().manual_seed(0)
torch.manual_seed(1 + rank)
times = []


def spread(count):
    """The times of this process's rows, one in each of as many equal intervals."""
    first, intervals = (rank * count, world_size * count) if FIXED else (0, count)  # WRONG
    offset = torch.rand((), generator=offsets)
    return (offset + torch.arange(first, first + count) / intervals) % 1


for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        time = spread(len(x))
        times += [round(each, 5) for each in time.tolist()]
        noise = torch.randn_like(x)
        mixed = torch.lerp(x, noise, time[:, None])
        loss = ((model(torch.cat([mixed, time[:, None]], 1)) - (noise - x)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, times)
if rank == 0:
    print(f"different times: {len({time for part in every for time in part})}")
dist.destroy_process_group()
