"""Prints ten megabytes, and a time, which differs in each run."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.randn(200, 3)
model, loader = nn.Linear(3, 1), DataLoader(TensorDataset(inputs), batch_size=16, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for (x,) in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        print("step " * 100_000)
    with torch.no_grad():
        model(inputs[:4])
    print(f"evaluated at {time.perf_counter():.4f}")
    for line in range(20_000):
        print(f"line {line} of epoch {epoch} 0123456789")
