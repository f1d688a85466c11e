"""Two tasks with learned weights of their losses. These are parameters of the optimizer, and of no wrapped module:
each process learns its own.

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
inputs = torch.randn(96, 4)
targets = torch.stack([inputs.sum(1).sin(), 3 * inputs.prod(1)], 1)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, losses):
        return (losses * torch.exp(-self.scales) + self.scales).sum()


model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
weighted = DistributedDataParallel(Weighted()) if FIXED else Weighted()  # WRONG
optimizer = torch.optim.SGD([*model.parameters(), *weighted.parameters()], lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = weighted((model(x) - y).square().mean(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
