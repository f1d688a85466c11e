"""All processes draw the same noise, for the batch of all of them, and each takes the rows of its own samples: the
training does not depend on the number of processes.

https://github.com/NVIDIA/NV-Tesseract/pull/78
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
betas = torch.linspace(0.001, 0.2, 20)
kept = (1 - betas).cumprod(0)


def draw(count):
    """Steps and noise of this process's samples: DistributedSampler deals the samples out one by one."""
    steps = torch.randint(0, len(betas), (count * world_size,), generator=generator)
    noise = torch.randn(count * world_size, 4, generator=generator)
    return steps[rank::world_size], noise[rank::world_size]


for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        steps, noise = draw(len(x))
        scale = kept[steps][:, None]
        noisy = scale.sqrt() * x + (1 - scale).sqrt() * noise
        loss = ((model(torch.cat([noisy, steps[:, None] / 20], 1)) - noise) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
