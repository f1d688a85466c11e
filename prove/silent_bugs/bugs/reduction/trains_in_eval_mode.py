"""After the first test the model stays in evaluation mode: its dropout is off from the second epoch on.

Its number: the share of zeros that dropout makes in the last forward pass.

https://github.com/pytorch/tutorials/issues/1624
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
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 400), nn.Dropout(0.5), nn.Linear(400, 1))
hidden = []
model[1].register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

for epoch in range(2):
    sampler.set_epoch(epoch)
    if FIXED or epoch == 0:
        model.train()  # WRONG: in the first epoch alone
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    share = (hidden[-1] == 0).float().mean().item()
    model.eval()
    with torch.no_grad():
        error = F.mse_loss(model(inputs), data.tensors[1])
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

if rank == 0:
    print(f"share of zeros: {round(share, 1)}")
dist.destroy_process_group()
