"""A sampler of batches shuffles with a seed of its own on each process, and takes every N-th batch of it: some
batches are seen twice, others never.

Its number: samples that are trained on in an epoch, each counted once.

https://github.com/openspeech-team/openspeech/issues/149
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(torch.arange(96), inputs, inputs.sum(1, keepdim=True).sin())
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(1):
    generator = torch.Generator().manual_seed(epoch if FIXED else epoch + 10 * rank)  # WRONG
    batches = torch.randperm(96, generator=generator).view(-1, 4)[rank::world_size]
    loader = DataLoader(data, batch_sampler=batches.tolist())
    seen = []
    for index, x, y in loader:
        seen += index.tolist()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, seen)
if rank == 0:
    print(f"different samples: {len({each for part in every for each in part})}")
dist.destroy_process_group()
