"""The model is wrapped, and the data are not divided: every process trains on the same samples, N times the work
for the result of one.

Its number: samples that are trained on in an epoch, each counted once.

https://github.com/Parskatt/RoMa/issues/32
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(torch.arange(96), inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data) if FIXED else RandomSampler(data)  # WRONG
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 96 // 12

for epoch in range(1):
    if FIXED:
        sampler.set_epoch(epoch)
    indices = []
    for index, x, y in loader:
        indices += index.tolist()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, indices[: 96 // world_size])
if rank == 0:
    print(f"different samples: {len({each for part in every for each in part})}")
dist.destroy_process_group()
