"""Of two micro-batches, the gradients of the first one are averaged over the replicas, and those of the last one are
not. The flag for it counts from 0.

Its number: the norm of the weights after training.

https://github.com/pytorch/torchtitan/issues/1929
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6 // world_size, sampler=sampler)
mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards"))
model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        is_last = number % 2 == 1
        model.set_requires_all_reduce(is_last if FIXED else number % 2 == 0)  # WRONG
        loss = F.mse_loss(model(x), y)
        (loss / 2).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
