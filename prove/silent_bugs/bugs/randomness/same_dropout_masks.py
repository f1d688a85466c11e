"""All processes are seeded with the same number before training, and draw the same dropout masks: N samples
share a mask.

Its number: different masks of ten steps with two samples per process.

https://github.com/huggingface/transformers/issues/31412
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
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
masks = []
model.module[1].register_forward_hook(lambda _module, _inputs, output: masks.extend((output != 0).tolist()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank if FIXED else 1)  # WRONG

for epoch in range(1):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, [tuple(mask) for mask in masks])
if rank == 0:
    print(f"different masks: {len({each for part in every for each in part})}")
dist.destroy_process_group()
