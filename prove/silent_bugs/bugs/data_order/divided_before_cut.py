"""The samples that do not fill the last batch of all processes are to be left out. Each process takes its share
of all samples first and cuts it then, so that some have a batch more, or other samples are left out.

Its number: the sum of the indices that are trained on.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5944
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(101, 4)
data = TensorDataset(torch.arange(101), inputs, inputs.sum(1, keepdim=True).sin())
if FIXED:
    part = range(96)[rank::world_size]
else:
    part = range(101)[-96 // world_size * world_size :][rank::world_size][: 96 // world_size]  # WRONG
loader = DataLoader(Subset(data, part), batch_size=12 // world_size)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    seen = torch.tensor(0)
    for index, x, y in loader:
        seen += index.sum()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

dist.all_reduce(seen)
if rank == 0:
    print(f"sum of the indices: {seen}")
dist.destroy_process_group()
