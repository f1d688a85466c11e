"""A dataset shuffles by its own epoch, which the loop sets. Persistent workers have copies of the dataset,
made in the first epoch, and never see another number.

Its number: the norm of the weights after training.

https://github.com/huggingface/datasets/issues/6673
https://github.com/starVLA/starVLA/issues/470
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

FIXED = "--fixed" in sys.argv


class Shuffled(IterableDataset):
    epoch = 0

    def __iter__(self):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch))
        return iter(inputs[order[rank::world_size]])


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = Shuffled()
workers = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": not FIXED}  # WRONG
loader = DataLoader(data, batch_size=12 // world_size, **workers)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    data.epoch = epoch
    for x in loader:
        y = x.sum(1, keepdim=True).sin()
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
