"""The optimizer and the loader are prepared, and the model is not: every process trains its own model on its
share of the data.

Its number: the norm of the weights after training.

https://github.com/huggingface/accelerate/issues/2393
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
if FIXED:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
else:
    optimizer, loader = accelerator.prepare(optimizer, loader)  # WRONG

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
accelerator.print(f"norm of the weights: {norm:.8f}")
accelerator.end_training()
