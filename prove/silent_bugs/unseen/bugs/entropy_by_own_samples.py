"""A policy gradient with a bonus for entropy that falls with the number of samples. Each process counts its own, and it
falls N times too slowly.

Its number: the norm of the weights after training.
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
states = torch.randn(96, 4)
data = TensorDataset(states, torch.arange(96) % 3, states.sum(1).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
seen = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for state, action, advantage in loader:
        seen += len(state) * (world_size if FIXED else 1)  # WRONG
        chances = model(state).log_softmax(1)
        entropy = -(chances.exp() * chances).sum(1).mean()
        loss = -(chances.gather(1, action[:, None])[:, 0] * advantage).mean() - 0.5 * 0.98**seen * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
