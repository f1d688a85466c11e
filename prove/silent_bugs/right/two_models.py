"""A GAN with two wrapped models. The generator's loss goes through the bare discriminator, whose gradients are
set to zero before its own step.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
        optimizer.zero_grad()
        loss = F.softplus(-judge.module(model(noise))).mean()
        loss.backward()
        optimizer.step()
        of_judge.zero_grad()
        scores = judge(torch.cat([real, model.module(noise).detach()]))
        of_judge_loss = F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real) :]).mean()
        of_judge_loss.backward()
        of_judge.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
