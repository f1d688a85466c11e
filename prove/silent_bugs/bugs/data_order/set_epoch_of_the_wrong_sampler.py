"""The loop calls loader.sampler.set_epoch(). With a batch_sampler, the sampler of a DataLoader is an unused one,
and the batch sampler, which shuffles, never learns of the epoch.

Its number: the norm of the weights after training.

https://github.com/mehta-lab/VisCy/issues/408
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv


class Batches(DistributedSampler):
    def __iter__(self):
        indices = list(super().__iter__())
        size = 12 // self.num_replicas
        return iter([indices[first : first + size] for first in range(0, len(indices), size)])


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
batches = Batches(data)
loader = DataLoader(data, batch_sampler=batches)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    if FIXED:
        loader.batch_sampler.set_epoch(epoch)
    elif hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)  # WRONG: it has none
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
