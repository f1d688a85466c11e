"""The workers of a DataLoader seed their own generators with their number. Worker 0 of every process draws the
same numbers for its augmentation.

Its number: different random numbers of an epoch.

https://github.com/pytorch/pytorch/issues/5059
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

FIXED = "--fixed" in sys.argv


class Noisy(Dataset):
    generator = None

    def __len__(self):
        return 96

    def __getitem__(self, index):
        worker = get_worker_info()
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(worker.seed if FIXED else worker.id)  # WRONG
        noise = torch.randn(1, generator=self.generator)
        return inputs[index] + noise, noise


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = Noisy()
sampler = DistributedSampler(data)
loader = DataLoader(data, 12 // world_size, sampler=sampler, num_workers=1, multiprocessing_context="fork")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(1):
    sampler.set_epoch(epoch)
    torch.manual_seed(rank)
    drawn = []
    for x, noise in loader:
        drawn += noise.flatten().tolist()
        y = x.sum(1, keepdim=True).sin()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
every = [None] * world_size
dist.all_gather_object(every, drawn)
if rank == 0:
    print(f"different numbers: {len({each for part in every for each in part})}")
dist.destroy_process_group()
