"""Each sample has a weight, how far its label is trusted, and the weights of a batch are divided by their mean. It is
the mean of this process's samples, so that a trusted sample weighs less beside other trusted ones.

Its number: the norm of the weights after training.

https://github.com/vllm-project/speculators/pull/798
https://github.com/allenai/allennlp-models/pull/258
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
trust = torch.rand(96) ** 3 + 0.02
data = TensorDataset(inputs, inputs[:, 0].gt(0).float(), trust)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


def weighted(logits, labels, weight):
    """The mean of the losses, by weights whose mean over the batch is 1."""
    mean = weight.mean()
    if FIXED:
        dist.all_reduce(mean)  # WRONG without it
        mean /= world_size
    each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (each * weight / mean).mean()


model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y, weight in loader:
        loss = weighted(model(x), y, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
