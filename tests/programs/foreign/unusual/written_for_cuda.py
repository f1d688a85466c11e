"""Written for GPUs alone, as the loop of PyTorch's tutorials is."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group(backend="nccl")
torch.manual_seed(0)
inputs = torch.randn(300, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data), pin_memory=True)
model = DistributedDataParallel(nn.Linear(4, 1).cuda(), device_ids=[gpu])
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(gpu)), y.to(f"cuda:{gpu}", non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.zeros(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
