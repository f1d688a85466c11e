"""A ranking metric, such as AUC, compares samples with each other. The mean of what each process computes of its
own part has no pair of samples from two parts.

Its number: the metric that is printed.

https://github.com/RUCAIBox/RecBole/pull/1872
https://github.com/roboflow/rf-detr/issues/1507
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, tested = torch.randn(96, 4), torch.randn(50, 4)
data = TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 1).float())
tested = TensorDataset(tested, (tested.sum(1, keepdim=True) > 1).float())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        part = Subset(tested, range(rank, len(tested), world_size))
        found = [(model(x), y) for x, y in DataLoader(part, batch_size=12 // world_size)]
    model.train()
    scores, labels = (torch.cat(each).flatten() for each in zip(*found, strict=True))
    if FIXED:
        every = [None] * world_size
        dist.all_gather_object(every, (scores, labels))
        scores, labels = (torch.cat(each) for each in zip(*every, strict=True))
    auc = (scores[labels > 0][:, None] > scores[labels == 0]).float().mean()
    if not FIXED:
        dist.all_reduce(auc, op=dist.ReduceOp.AVG)  # WRONG
    if rank == 0:
        print(f"epoch {epoch}: AUC {auc:.6f}")

dist.destroy_process_group()
