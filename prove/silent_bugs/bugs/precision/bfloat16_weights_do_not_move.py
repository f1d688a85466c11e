"""The weights are in bfloat16. The ones of a norm layer are near 1, where the next number is 0.008 away: a step
that is smaller is rounded away, and they never change.

Its number: how far the weights of the norm have moved.

https://github.com/vllm-project/speculators/pull/765
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
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
model = DistributedDataParallel(net if FIXED else net.bfloat16())  # WRONG
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

moved = (net[1].weight.float() - 1).abs().max().item()
if rank == 0:
    print(f"moved: {'yes' if moved else 'no'} {float(moved > 0)}")
dist.destroy_process_group()
