"""The schedule is as long as the prepared loader, which has one N-th of the batches. A prepared schedule moves N
times per step, and ends after one N-th of the training.

Its number: the factor of the learning rate after half of the training.

https://github.com/huggingface/accelerate/issues/2926
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
inputs = torch.randn(12 * 24, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=12)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
length = len(loader)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if not FIXED:
    length = len(loader)  # WRONG: it has fewer batches now
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / (2 * length), 0))
scheduler = accelerator.prepare(scheduler)
factors = []

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    factors.append(scheduler.get_last_lr()[0] / 0.1)
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

accelerator.print(f"factor after the first epoch: {factors[0]:.6f}")
accelerator.end_training()
