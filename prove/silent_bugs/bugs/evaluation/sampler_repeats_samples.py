"""DistributedSampler repeats the first test samples, so that all processes have as many: they count twice in the
metric.

Its number: the metric that is printed.

https://github.com/huggingface/accelerate/issues/226
https://github.com/RUCAIBox/RecBole/pull/1872
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
tested = torch.randn(49, 4)  # by 2 and by 3, one is left
tested = TensorDataset(tested, tested.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        part = DistributedSampler(tested, shuffle=False)  # WRONG
        if FIXED:
            part = range(rank, len(tested), world_size)
        for x, y in DataLoader(tested, batch_size=12 // world_size, sampler=part):
            total += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    model.train()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: error {total[0] / total[1]:.7f}")

dist.destroy_process_group()
