"""LBFGS computes the loss several times per step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.LBFGS(model.parameters())
for _ in range(5):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.prod(1, keepdim=True))
        loss.backward()
        return loss

    optimizer.step(closure)
dist.destroy_process_group()
