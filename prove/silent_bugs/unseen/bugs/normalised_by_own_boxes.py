"""A detector in the style of RetinaNet: the sum of the losses of all places is divided by the number of places
with an object in the batch of this process, and not by its mean over the processes.

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
images = torch.randn(96, 1, 6, 6)
data = TensorDataset(images, (images[:, 0] > torch.linspace(0, 2.5, 96).view(-1, 1, 1)).float())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.head(self.body(x).relu())[:, 0]


model = DistributedDataParallel(Detector())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, objects in loader:
        count = objects.sum()
        if FIXED:
            dist.all_reduce(count)  # WRONG without it
            count /= world_size
        losses = F.binary_cross_entropy_with_logits(model(x), objects, reduction="none")
        loss = losses.sum() / count.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
