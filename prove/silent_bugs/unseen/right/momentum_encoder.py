"""A momentum encoder makes the keys of each batch without a gradient. The keys of all processes are gathered, in the
order of the batch of one process, for a queue that is the same everywhere.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
views = torch.randn(96, 2, 4)
data = TensorDataset(views)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Linear(4, 3))
momentum = copy.deepcopy(model.module).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
queue = F.normalize(torch.randn(24, 3), dim=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        with torch.no_grad():
            for slow, fast in zip(momentum.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = F.normalize(momentum(x[:, 1]), dim=1)
            parts = [torch.empty_like(keys) for _ in range(world_size)]
            dist.all_gather(parts, keys)
        queries = F.normalize(model(x[:, 0]), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([queue, torch.stack(parts, 1).flatten(0, 1)])[-24:]
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
