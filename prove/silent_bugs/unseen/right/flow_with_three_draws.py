"""Flow matching with a guidance that is dropped for some samples: a time, noise and a coin for each sample, from a
seed of each process. The loss is the mean over the samples of this process, and all samples weigh the same.

https://github.com/PKU-YuanGroup/Open-Sora-Plan/issues/366
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4), torch.arange(96) % 3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.labels = nn.Embedding(4, 3)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))

    def forward(self, x, time, label):
        return self.layers(torch.cat([x, time, self.labels(label)], 1))


model = DistributedDataParallel(Velocity())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, label in loader:
        time = torch.randn(len(x), 1).sigmoid()
        noise = torch.randn_like(x)
        label = torch.where(torch.rand(len(x)) < 0.2, 3, label)
        found = model(time * x + (1 - time) * noise, time, label)
        each = ((found - (x - noise)) ** 2).flatten(1).mean(1)
        each.retain_grad()
        loss = each.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"a sample weighs {each.grad.mean().item() / world_size:.6f}")
dist.destroy_process_group()
