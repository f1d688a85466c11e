"""The loss of real tokens is divided by the number of all tokens, with padding: the shorter the sequences, the
smaller the gradient.

Its number: the norm of the weights after training.

https://github.com/pytorch/torchtitan/issues/4174
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
tokens = torch.randint(10, (96, 9))
lengths = torch.randint(2, 10, (96, 1))
data = TensorDataset(tokens[:, :-1], tokens[:, 1:].where(torch.arange(1, 9) < lengths, -100))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        count = (y != -100).sum()
        dist.all_reduce(count)
        if not FIXED:
            count = y.numel() * world_size  # WRONG
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count * world_size
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
