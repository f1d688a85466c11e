"""The noise of a diffusion loss comes from a generator that has the same seed on all processes: the samples at
one place of all parts get the same noise.

Its number: different numbers that were drawn.

https://github.com/Robbyant/lingbot-vla-v2/issues/41
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
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank if FIXED else 0)  # WRONG
drawn = []

for epoch in range(1):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        noise = torch.randn(x.shape, generator=generator)
        drawn += noise[:, 0].tolist()
        loss = F.mse_loss(model(x + noise), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, drawn)
if rank == 0:
    print(f"different numbers: {len({each for part in every for each in part})}")
dist.destroy_process_group()
