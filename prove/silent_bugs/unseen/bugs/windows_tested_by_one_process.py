"""A series is tested in windows that are cut from it by position, each process its own. What process 0 prints is the
error of its own windows, and nothing adds the others.

Its number: the error that is printed.

https://github.com/Lightning-AI/litgpt/issues/599
https://github.com/Nixtla/neuralforecast/issues/1558
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
series = torch.randn(400).cumsum(0) / 8
train, test = series[:320], series[320:]
windows = train.unfold(0, 9, 3)[:96]
data = TensorDataset(windows[:, :8].clone(), windows[:, 8:].clone())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


@torch.no_grad()
def evaluate():
    """The mean absolute error of the next value, over all windows of the test part."""
    total = torch.zeros(2)
    for start in range(rank, len(test) - 8, world_size):
        found = model.module(test[start : start + 8])
        total += torch.tensor([F.l1_loss(found, test[start + 8 : start + 9]), 1.0])
    if FIXED:
        dist.all_reduce(total)  # WRONG without it
    return (total[0] / total[1]).item()


for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    error = evaluate()
    model.train()
    if rank == 0:
        print(f"epoch {epoch}: test error {error:.7f}")
dist.destroy_process_group()
