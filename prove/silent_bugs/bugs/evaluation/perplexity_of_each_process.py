"""Each process takes the exponential of its own mean loss, and the results are averaged. The perplexity is the
exponential of the mean over all tokens.

Its number: the metric that is printed.

https://github.com/allenai/allennlp/issues/4347
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
inputs, tested = torch.randn(96, 4), torch.randn(49, 4)
data = TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 1).float())
tested = TensorDataset(4 * tested, (tested.sum(1, keepdim=True) > 1).float())
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
    total = torch.zeros(2)
    with torch.no_grad():
        part = Subset(tested, range(rank, len(tested), world_size))
        for x, y in DataLoader(part, batch_size=12 // world_size):
            total += torch.tensor([F.binary_cross_entropy_with_logits(model(x), y, reduction="sum"), len(x)])
    model.train()
    if FIXED:
        dist.all_reduce(total)
    perplexity = (total[0] / total[1]).exp()
    if not FIXED:
        dist.all_reduce(perplexity, op=dist.ReduceOp.AVG)  # WRONG
    if rank == 0:
        print(f"epoch {epoch}: perplexity {perplexity:.6f}")

dist.destroy_process_group()
