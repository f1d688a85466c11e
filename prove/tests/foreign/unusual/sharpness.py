"""Two looks at each batch, as sharpness-aware minimization takes them: a step with a closure, inside it another one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoLooks(torch.optim.Optimizer):
    def __init__(self, parameters, radius=0.05):
        super().__init__(parameters, {"radius": radius})
        parameters = self.param_groups[0]["params"]
        self.inner = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=1e-2)

    @torch.no_grad()
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad * (self.param_groups[0]["radius"] / norm) for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        self.inner.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(300, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = TwoLooks(model.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=16, sampler=sampler):

        def look(x=x, y=y):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        look()
        optimizer.step(look)
        optimizer.zero_grad()
