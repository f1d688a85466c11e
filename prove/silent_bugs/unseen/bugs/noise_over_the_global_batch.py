"""A denoiser whose loss is summed over the samples and divided by the batch of all processes. DistributedDataParallel
averages over the processes once more, and each sample weighs N times too little.

Its number: what a sample weighs in the gradient of a step.

https://github.com/NVIDIA/physicsnemo/issues/605
https://github.com/verl-project/verl-SpeCo/pull/29
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
images = torch.randn(96, 4)
data = TensorDataset(images)
batch_size = 12
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=batch_size // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        sigma = (1.2 * torch.randn(len(x), 1) - 1.2).exp()
        noisy = x + sigma * torch.randn_like(x)
        denoised = model(torch.cat([noisy, sigma.log() / 4], 1))
        each = ((denoised - x) ** 2 * (sigma**2 + 0.25) / (0.5 * sigma) ** 2).sum(1)
        each.retain_grad()
        loss = each.sum() / (len(x) if FIXED else batch_size)  # WRONG
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"a sample weighs {each.grad.mean().item() / world_size:.6f}")
dist.destroy_process_group()
