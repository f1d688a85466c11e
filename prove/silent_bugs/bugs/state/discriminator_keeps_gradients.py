"""The generator's loss goes through the discriminator and leaves gradients there, which the discriminator's next
step has as well.

Its number: the norm of the weights after training.

https://github.com/facebookresearch/nwm/issues/16
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
data = TensorDataset(inputs, torch.randn(96, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 4))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for noise, real in loader:
        judge.requires_grad_(False) if FIXED else None  # WRONG without it
        optimizer.zero_grad()
        loss = F.softplus(-judge.module(model(noise))).mean()
        loss.backward()
        optimizer.step()
        judge.requires_grad_(True)
        both = torch.cat([real, model.module(noise).detach()])
        scores = judge(both)
        of_judge_loss = F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real) :]).mean()
        of_judge_loss.backward()
        of_judge.step()
        of_judge.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
