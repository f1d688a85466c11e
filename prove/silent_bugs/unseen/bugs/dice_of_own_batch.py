"""Segmentation with the Dice loss of a whole batch, a ratio of two sums. Each process has the ratio of its own
batch, and the mean of these ratios is another loss.

Its number: the norm of the weights after training.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(96, 1, 6, 6)
data = TensorDataset(images, (images[:, 0] > torch.linspace(-1, 2, 96).view(-1, 1, 1)).float())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, mask in loader:
        found = model(x)[:, 0].sigmoid()
        sums = torch.stack([(found * mask).sum(), found.sum() + mask.sum()])
        if FIXED:
            sums = all_reduce(sums)  # WRONG without it
        loss = 1 - 2 * sums[0] / sums[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
