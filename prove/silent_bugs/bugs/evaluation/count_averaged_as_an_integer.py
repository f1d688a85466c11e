"""A count is averaged over processes as an integer. The division is rounded down, and so are the counts that are
printed.

Its number: the mean number of right predictions per process, times the number of processes.

https://github.com/Lightning-AI/pytorch-lightning/issues/21859
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
inputs, tested = torch.randn(96, 4), torch.randn(50, 4)
data = TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 1).float())
tested = TensorDataset(tested, (tested.sum(1, keepdim=True) > 1).float())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    right = torch.tensor(0.0 if FIXED else 0)  # WRONG: an integer
    with torch.no_grad():
        part = Subset(tested, range(rank, len(tested), world_size))
        for x, y in DataLoader(part, batch_size=12 // world_size):
            right += ((model(x) > 0) == (y > 0)).sum()
    model.train()
    dist.all_reduce(right)
    mean = (right / world_size).to(right.dtype)
    if rank == 0:
        print(f"epoch {epoch}: right predictions {mean.item() * world_size:.1f}")

dist.destroy_process_group()
