"""The steps of a diffusion are drawn for half of the batch, and the other half has those at the other end: what a
sample gets depends on its place. Each process draws its own, and the loss is the mean over its samples.

https://github.com/pfnet-research/pfhedge/issues/449
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 1, 4, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler, drop_last=True)
kept = (1 - torch.linspace(0.001, 0.2, 20)).cumprod(0)
model = DistributedDataParallel(nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        half = torch.randint(0, len(kept), (len(x) // 2 + 1,))
        steps = torch.cat([half, len(kept) - half - 1])[: len(x)]
        noise = torch.randn_like(x)
        scale = kept[steps].view(-1, 1, 1, 1)
        noisy = scale.sqrt() * x + (1 - scale).sqrt() * noise
        found = model(torch.cat([noisy, scale.expand_as(x)], 1))
        each = (noise - found).square().sum((1, 2, 3))
        each.retain_grad()
        loss = each.mean(0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"a sample weighs {each.grad.mean().item() / world_size:.6f}")
dist.destroy_process_group()
