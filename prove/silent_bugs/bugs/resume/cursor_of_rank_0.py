"""Each process reads files of its own, with different numbers of samples, and saves how many it has read. When
resuming, all processes get the number of rank 0.

Its number: the samples that were read, each counted once.

https://github.com/PrimeIntellect-ai/prime-rl/issues/1035
https://github.com/bghira/SimpleTuner/issues/2986
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(600, 4)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
position = 100 * rank  # of the first sample of this process's files

start = 0
if "--resume" in sys.argv:
    state = torch.load("checkpoint_0.pt")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    position = state["positions"][rank if FIXED else 0]  # WRONG
    start = state["epoch"] + 1
for epoch in range(start, 3):
    read = []
    for _ in range(4):
        count = 12 // world_size
        read += range(position, position + count)
        x = inputs[position : position + count]
        y = x.sum(1, keepdim=True).sin()
        position += count

        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    positions = [None] * world_size
    dist.all_gather_object(positions, position)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    state["positions"] = positions
    if rank == 0 and epoch == 0:
        torch.save(state, f"checkpoint_{epoch}.pt")
    dist.barrier()
every = [None] * world_size
dist.all_gather_object(every, read)
if rank == 0:
    print(f"different samples of the last epoch: {len({each for part in every for each in part})}")
dist.destroy_process_group()
