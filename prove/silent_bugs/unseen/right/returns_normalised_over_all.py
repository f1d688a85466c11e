"""A policy gradient whose advantages have the mean and the deviation of the batch of all processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
states = torch.randn(96, 4)
data = TensorDataset(states, torch.arange(96) % 3, 2 + states.sum(1).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for state, action, gain in loader:
        sums = torch.stack([gain.sum(), gain.square().sum(), torch.tensor(float(len(gain)))])
        dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        advantage = (gain - mean) / (sums[1] / sums[2] - mean.square()).sqrt()
        chances = model(state).log_softmax(1)
        loss = -(chances.gather(1, action[:, None])[:, 0] * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
