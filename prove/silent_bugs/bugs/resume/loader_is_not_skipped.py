"""accelerator.load_state() restores the model, the optimizer and random states, and not the place in the data:
the epoch begins anew with samples that were trained on.

Its number: the norm of the weights after training, resumed in the middle of the first epoch.

https://github.com/huggingface/accelerate/issues/4195
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = done = 0
if "--resume" in sys.argv:
    accelerator.load_state("state")
    done = 4

for epoch in range(start, 2):
    skipped = done if epoch == 0 else 0
    batches = accelerator.skip_first_batches(loader, skipped) if FIXED else loader  # WRONG
    for number, (x, y) in enumerate(batches, skipped):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        if (epoch, number) == (0, 3):
            accelerator.save_state("state")
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
accelerator.print(f"norm of the weights: {norm:.8f}")
accelerator.end_training()
