"""The gradients are divided while an asynchronous all_reduce still sums them: some numbers are divided before,
and some after they were sent.

Its number: the norm of the gradients in the last step.

https://github.com/OpenNMT/OpenNMT-py/issues/2295
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 300_000), nn.Tanh(), nn.Linear(300_000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

for epoch in range(1):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        handle = dist.all_reduce(gradients, async_op=True)
        if FIXED:
            handle.wait()  # WRONG: too late
        gradients /= world_size
        handle.wait()
        parts = gradients.split([parameter.numel() for parameter in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"norm of the gradients: {gradients.norm().item():.6f}")
dist.destroy_process_group()
