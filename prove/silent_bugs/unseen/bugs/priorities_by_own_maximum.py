"""Q-learning from a buffer with priorities. The importance weights are divided by the largest one of the batch, which
is that of this process.

Its number: the norm of the weights after training.
"""

import copy
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
states = torch.randn(96, 4)
rewards, nexts = states.sum(1).sin(), states.roll(1, 0)
data = TensorDataset(states, torch.arange(96) % 3, rewards, nexts, torch.rand(96) + 0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
target = copy.deepcopy(model.module).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for state, action, reward, after, priority in loader:
        weight = priority**-0.5
        largest = weight.max()
        if FIXED:
            dist.all_reduce(largest, dist.ReduceOp.MAX)  # WRONG without it
        aim = reward + 0.9 * target(after).max(1).values
        error = model(state).gather(1, action[:, None])[:, 0] - aim
        loss = (weight / largest * error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    target.load_state_dict(model.module.state_dict())
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
