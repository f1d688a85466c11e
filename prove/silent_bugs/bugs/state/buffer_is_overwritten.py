"""A buffer counts on each process how often a class was seen. DistributedDataParallel copies the buffers of rank
0 to the others in each forward pass, and what they have counted is lost.

Its number: the samples that were counted over all processes.

https://github.com/pytorch/pytorch/issues/13711
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += torch.stack([(x[:, 0] < 0.6).sum(), (x[:, 0] >= 0.6).sum()])
        return self.net(x)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(Model(), broadcast_buffers=not FIXED)  # WRONG
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

seen = model.module.seen.clone()
dist.all_reduce(seen)
if rank == 0:
    print(f"counted, of the second class: {seen[1]:.0f}")
dist.destroy_process_group()
