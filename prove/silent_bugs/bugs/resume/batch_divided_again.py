"""The batch size of a process is saved, and divided by the number of processes once more when resuming.

Its number: the norm of the weights after training, resumed after the first epoch.

https://github.com/ultralytics/yolov5/issues/475
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
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batch_size = 12 // world_size

start = 0
if "--resume" in sys.argv:
    state = torch.load("checkpoint_0.pt")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    batch_size = state["batch_size"] if FIXED else state["batch_size"] // world_size  # WRONG
    start = state["epoch"] + 1
loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

for epoch in range(start, 3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    state["batch_size"] = batch_size
    if rank == 0:
        torch.save(state, f"checkpoint_{epoch}.pt")
    dist.barrier()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
