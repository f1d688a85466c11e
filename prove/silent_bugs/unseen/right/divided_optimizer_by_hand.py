"""An optimizer that is divided by hand, as in ZeRO: each process steps its part of all parameters in one vector, which
is filled up to a multiple of the processes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
count = sum(parameter.numel() for parameter in model.parameters())
size = -(-count // world_size)
flat = nn.utils.parameters_to_vector(model.parameters()).detach()
flat = F.pad(flat, (0, max(0, size * world_size - count)))
momentum = torch.zeros(size)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        whole = F.pad(torch.cat([each.flatten() for each in gradients]), (0, len(flat) - count))
        dist.all_reduce(whole)
        own = slice(rank * size, (rank + 1) * size)
        momentum.mul_(0.9).add_(whole[own] / world_size)
        parts = [torch.empty(size) for _ in range(world_size)]
        dist.all_gather(parts, flat[own] - 0.05 * momentum)
        flat[: size * world_size] = torch.cat(parts)
        nn.utils.vector_to_parameters(flat[:count], model.parameters())
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
