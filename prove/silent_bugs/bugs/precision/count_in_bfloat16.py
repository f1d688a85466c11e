"""A count of samples is summed in the dtype of the loss, bfloat16. It has 8 bits: at 256, 1 more is rounded
away.

Its number: the samples that were counted.

https://github.com/pytorch/pytorch/issues/139242
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
inputs = torch.randn(1200, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = torch.tensor(0.0, dtype=torch.float32 if FIXED else torch.bfloat16)  # WRONG

for epoch in range(1):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        for _ in x:
            seen += 1
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

dist.all_reduce(seen)
if rank == 0:
    print(f"samples: {seen:.0f}")
dist.destroy_process_group()
