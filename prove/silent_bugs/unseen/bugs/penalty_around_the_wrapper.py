"""A GAN with the R1 penalty, whose backward pass goes through the bare discriminator, after that of the loss: the
penalty's gradient is not averaged.

Its number: the norm of the weights after training.
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
reals = torch.randn(96, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]]) + 1
noise = torch.randn(96, 3)
data = TensorDataset(noise, reals)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
judge = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
judge = DistributedDataParallel(judge)
of_model = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
of_judge = torch.optim.Adam(judge.parameters(), lr=0.02, betas=(0.5, 0.9))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for z, real in loader:
        of_judge.zero_grad()
        real.requires_grad_()
        scores = judge(torch.cat([real, model(z).detach()]))
        loss = F.softplus(-scores[: len(z)]).mean() + F.softplus(scores[len(z) :]).mean()
        of_real = scores if FIXED else judge.module(real)  # WRONG
        (slope,) = torch.autograd.grad(of_real[: len(z)].sum(), real, create_graph=True)
        penalty = slope.square().sum(1).mean()
        if FIXED:
            (loss + penalty).backward()
        else:
            loss.backward()
            penalty.backward()
        of_judge.step()
        of_model.zero_grad()
        F.softplus(-judge.module(model(z))).mean().backward()
        of_model.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
