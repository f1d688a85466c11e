"""A schedule that steps once per epoch is prepared. A prepared schedule moves as often as there are processes,
as if each step were a batch: it is N times too fast.

Its number: the learning rate after two epochs.

https://github.com/huggingface/accelerate/issues/2142
https://github.com/huggingface/transformers/pull/24088
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
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=12 // accelerator.num_processes)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if not FIXED:
    scheduler = accelerator.prepare(scheduler)  # WRONG

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    scheduler.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

accelerator.print(f"learning rate: {scheduler.get_last_lr()[0]:.8f}")
accelerator.end_training()
