"""Prints ten megabytes, and times, which differ in each run, or on each number of processes."""

import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class SlowItems(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.02)
        return inputs[index]


accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.randn(200, 3)
model, loader = nn.Linear(3, 1), DataLoader(TensorDataset(inputs), batch_size=16, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
test_loader = DataLoader(SlowItems(), batch_size=20)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
for epoch in range(3):
    for (x,) in loader:
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        print("step " * 100_000)
    begin = time.time()
    with torch.no_grad():
        results = torch.cat([accelerator.gather_for_metrics(model(x)) for x in test_loader])
    print(f"mean {results.mean().item():.4f}, took {int(time.time() - begin)} seconds")
    print(f"evaluated at {time.perf_counter():.4f}")
    for line in range(20_000):
        print(f"line {line} of epoch {epoch} 0123456789")
