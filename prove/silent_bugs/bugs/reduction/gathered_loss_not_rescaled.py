"""Each process computes the contrastive loss of the whole batch, but only its own features have a gradient.
DistributedDataParallel divides the sum of these parts by N, so the loss must be multiplied by N.

Its number: the norm of the weights after training.

https://github.com/JohnGiorgi/DeCLUTR/pull/212
https://github.com/ShiqiYu/OpenGait/issues/36
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
data = TensorDataset(inputs)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        own = F.normalize(model(x), dim=1)
        features = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(features, own.detach())
        features[rank] = own
        features = torch.cat(features)
        loss = F.cross_entropy(features @ features.T / 0.1, torch.arange(12))
        if FIXED:
            loss = loss * world_size  # WRONG without it
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
