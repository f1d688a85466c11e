"""The random state of rank 0 is saved and given to all processes when resuming: from then on they draw the same
dropout masks.

Its number: different numbers that are drawn in the last epoch.

https://github.com/NVIDIA/Megatron-LM/issues/6858
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
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(rank)

start = 0
if "--resume" in sys.argv:
    state = torch.load("checkpoint_0.pt")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"][rank if FIXED else 0])  # WRONG
    start = state["epoch"] + 1
for epoch in range(start, 3):
    sampler.set_epoch(epoch)
    drawn = []
    for x, y in loader:
        noise = 0.1 * torch.randn(x.shape)
        drawn += noise[:, 0].tolist()
        x = x + noise
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    random = [None] * world_size
    dist.all_gather_object(random, torch.get_rng_state())
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    state["random"] = random
    if rank == 0:
        torch.save(state, f"checkpoint_{epoch}.pt")
    dist.barrier()
every = [None] * world_size
dist.all_gather_object(every, drawn)
if rank == 0:
    print(f"different numbers: {len({each for part in every for each in part})}")
dist.destroy_process_group()
