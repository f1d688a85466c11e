"""Each process gathers the mean of its batch. gather_for_metrics() cannot remove repeated samples from a mean,
and the last batch, which is smaller, counts as much as the others.

Its number: the metric that is printed.

https://github.com/huggingface/trl/issues/7010
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs, tested = torch.randn(96, 4), torch.randn(50, 4)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
tested = TensorDataset(tested, (tested.sum(1) > 0).long())
loader = DataLoader(data, batch_size=12 // accelerator.num_processes)
test_loader = DataLoader(tested, batch_size=12 // accelerator.num_processes)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    losses = []
    with torch.no_grad():
        for x, y in test_loader:
            of_samples = F.cross_entropy(model(x), y, reduction="none")
            if not FIXED:
                of_samples = of_samples.mean().repeat(1)  # WRONG
            losses.append(accelerator.gather_for_metrics(of_samples))
    accelerator.print(f"epoch {epoch}: test loss {torch.cat(losses).mean():.6f}")


accelerator.end_training()
