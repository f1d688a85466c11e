"""Mixed precision on whatever there is, with GradScaler, one GPU for each process."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(300, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device.type)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
dist.destroy_process_group()
