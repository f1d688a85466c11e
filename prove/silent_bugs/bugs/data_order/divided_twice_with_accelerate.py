"""The dataset is divided by hand over the processes, and the prepared loader divides it once more: a part of
the samples is never trained on.

Its number: different samples of an epoch.

https://github.com/huggingface/accelerate/issues/3520
"""

import sys

import accelerate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

FIXED = "--fixed" in sys.argv

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(108, 4)
data = TensorDataset(torch.arange(108), inputs, inputs.sum(1, keepdim=True).sin())
if not FIXED:
    part = range(accelerator.process_index, 108, accelerator.num_processes)
    data = Subset(data, part)  # WRONG
loader = DataLoader(data, batch_size=12 // accelerator.num_processes)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(1):
    seen = []
    for index, x, y in loader:
        seen += index.tolist()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

every = accelerate.utils.gather_object([seen])
accelerator.print(f"different samples: {len({each for part in every for each in part})}")
accelerator.end_training()
