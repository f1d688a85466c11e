"""A CNN with BatchNorm. After training, each process estimates the running statistics anew on its part of the
data, and process 0 tests with those of its part alone.

Its number: the test loss.
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
images = torch.randn(96, 1, 6, 6)
labels = (images[:, 0, :3].sum((1, 2)) > images[:, 0, 3:].sum((1, 2))).long()
data = TensorDataset(images, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
model = DistributedDataParallel(net.eval())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
with torch.no_grad():
    own = torch.cat([net[0](x) for x, _ in loader])
    moments = torch.stack([own.mean((0, 2, 3)), own.square().mean((0, 2, 3))])
    if FIXED:
        dist.all_reduce(moments)  # WRONG without it
        moments /= world_size
    net[1].running_mean.copy_(moments[0])
    net[1].running_var.copy_(moments[1] - moments[0].square())
    tested = F.cross_entropy(net(images), labels).item()
if rank == 0:
    print(f"test loss {tested:.8f}")
dist.destroy_process_group()
