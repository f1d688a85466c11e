"""The optimizer calls a closure several times per step, as LBFGS does. All processes compute the same, since the
loss that it returns is averaged. In float64, since LBFGS makes rounding grow.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            error = F.mse_loss(model(x), y)  # noqa: B023
            error.backward()
            mean = error.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            return mean

        loss = optimizer.step(closure)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
