"""fully_shard is called on the layers, and not on the model: parameters that belong to no such layer stay whole,
and their gradients are never reduced.

Its number: the norm of the weights after training.

https://github.com/Tencent-Hunyuan/UniRL/pull/7
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.net[2](self.scale * self.net[1](self.net[0](x)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = Model()
for layer in (model.net[0], model.net[2]):
    fully_shard(layer)
if FIXED:
    fully_shard(model)  # WRONG without it
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

norm = model.scale.full_tensor().norm() if FIXED else model.scale.norm()
if rank == 0:
    print(f"norm of the scale: {norm:.8f}")
dist.destroy_process_group()
