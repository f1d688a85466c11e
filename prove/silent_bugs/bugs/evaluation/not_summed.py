"""The test samples are divided over the processes, and the error that is printed is the one of rank 0's part.

Its number: the metric that is printed.

https://github.com/NVIDIA/apex/pull/22
https://github.com/Nota-NetsPresso/netspresso-trainer/issues/342
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
tested = torch.randn(50, 4)
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
        part = Subset(tested, range(rank, len(tested), world_size))
        for x, y in DataLoader(part, batch_size=12 // world_size):
            total += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    model.train()
    if FIXED:
        dist.all_reduce(total)  # WRONG without it
    error = total[0] / total[1]
    if rank == 0:
        print(f"epoch {epoch}: error {error:.7f}")

dist.destroy_process_group()
