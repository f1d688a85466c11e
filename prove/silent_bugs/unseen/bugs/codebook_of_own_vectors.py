"""An autoencoder with a codebook that follows the mean of the vectors next to each code, in the forward pass. Each
process averages its own vectors, and DistributedDataParallel gives all the codebook of process 0.

Its number: the norm of the weights after training.
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
data = TensorDataset(inputs)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 2), nn.Linear(2, 4)
        self.register_buffer("codes", torch.randn(4, 2))

    def forward(self, x):
        z = self.encode(x)
        own = F.one_hot(torch.cdist(z, self.codes).argmin(1), 4).float()
        sums = torch.cat([own.T @ z.detach(), own.sum(0)[:, None]], 1)
        if FIXED:
            dist.all_reduce(sums)  # WRONG without it
        means = sums[:, :2] / sums[:, 2:].clamp(min=1)
        self.codes = torch.where(sums[:, 2:] > 0, self.codes.lerp(means, 0.2), self.codes)
        return self.decode(z + (own @ self.codes - z).detach())


model = DistributedDataParallel(Quantized())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
