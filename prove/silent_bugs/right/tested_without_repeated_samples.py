"""DistributedSampler repeats samples in the test. They are gathered with their indices, and each index counts
once.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, tested = torch.randn(96, 4), torch.randn(49, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
tested = TensorDataset(torch.arange(49), tested, tested.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
test_loader = DataLoader(tested, batch_size=5, sampler=DistributedSampler(tested, shuffle=False))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    errors = {}
    with torch.no_grad():
        for index, x, y in test_loader:
            errors.update(zip(index.tolist(), (model(x) - y).abs().flatten().tolist(), strict=True))
    model.train()
    every = [None] * world_size
    dist.all_gather_object(every, errors)
    errors = {index: error for part in every for index, error in part.items()}
    if rank == 0:
        print(f"epoch {epoch}: error {sum(errors.values()) / len(errors):.7f}")

dist.destroy_process_group()
