"""A contrastive loss over the samples of all processes, with a gather that has a gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
first = torch.randn(300, 6)
data = TensorDataset(first, first + 0.3 * torch.randn(300, 6))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=24, sampler=sampler, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def gathered(features):
    return torch.cat(all_gather(features))


for epoch in range(3):
    sampler.set_epoch(epoch)
    for one, other in loader:
        features = nn.functional.normalize(model(torch.cat([one, other])), dim=1)
        one, other = (gathered(each) for each in features.chunk(2))
        similar = one @ other.T / 0.1
        loss = nn.functional.cross_entropy(similar, torch.arange(len(similar)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
