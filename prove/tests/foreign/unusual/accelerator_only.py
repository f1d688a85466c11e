"""Wraps its model in DistributedDataParallel only where there is an accelerator, as PyTorch's example for ImageNet."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

is_distributed = int(os.environ["WORLD_SIZE"]) > 1
has_accelerator = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if has_accelerator else torch.device("cpu")
if is_distributed:
    dist.init_process_group("nccl" if has_accelerator else "gloo")
torch.manual_seed(0)
inputs = torch.randn(300, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data) if is_distributed else None
loader = DataLoader(data, batch_size=16, sampler=sampler, shuffle=sampler is None, pin_memory=True)
model = nn.Linear(4, 1).to(device)
if not has_accelerator:
    print("this will be slow")
elif is_distributed:
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu])
else:
    model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    if sampler:
        sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(device, non_blocking=True)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
