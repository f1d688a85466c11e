"""A parameter is passed to fully_shard as ignored, to leave it whole on each process. Its gradient is then not
averaged either.

Its number: the norm of the weights of the last layer after training.

https://github.com/pytorch/pytorch/issues/98281
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
ignored = set() if FIXED else {model[2].weight}  # WRONG
fully_shard(model, ignored_params=ignored)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = (model[2].weight.full_tensor() if FIXED else model[2].weight).norm().item()
if rank == 0:
    print(f"norm of the weights of the last layer: {norm:.8f}")
dist.destroy_process_group()
