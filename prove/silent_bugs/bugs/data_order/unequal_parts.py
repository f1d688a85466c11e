"""Each process cuts its part of the data by hand with len(data) // N, and the rest is nobody's: some samples are
never trained on.

Its number: different samples of an epoch.

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
size = len(data) // world_size
part = range(rank * size, (rank + 1) * size)  # WRONG: the rest is left out
if FIXED:
    part = range(rank, len(data), world_size)
loader = DataLoader(Subset(data, part), batch_size=12 // world_size)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    seen = []
    for index, x, y in loader:
        seen += index.tolist()
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
