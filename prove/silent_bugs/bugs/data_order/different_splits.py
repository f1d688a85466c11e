"""random_split draws the test samples, and each process draws its own: a process is tested on samples that
others train on.

Its number: test samples of rank 0 that some process trains on.

https://github.com/Lightning-AI/pytorch-lightning/issues/7728
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(120, 4)
data = TensorDataset(torch.arange(120), inputs, inputs.sum(1, keepdim=True).sin())
torch.manual_seed(0 if FIXED else rank)  # WRONG
data, tested = random_split(data, [96, 24])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
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
shared = {each for part in every for each in part} & {tested[number][0].item() for number in range(len(tested))}
if rank == 0:
    print(f"trained on and tested: {len(shared)}")
dist.destroy_process_group()
