"""Centers of classes, moved towards the features of their samples, are updated by each process from its own
part, and only rank 0's are saved.

Its number: the norm of the weights after training.

https://github.com/leggedrobotics/rsl_rl/pull/226
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
centers = torch.zeros(2, 3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        features = model(x)
        loss = (features - centers[1 - y] - 1).square().mean()
        loss.backward()
        optimizer.step()
        shift = torch.zeros(2, 3).index_add_(0, y, features.detach())
        if FIXED:
            dist.all_reduce(shift)  # WRONG without it
        centers += 0.01 * shift
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
