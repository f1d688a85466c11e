"""The schedule is not prepared, as it is stepped per epoch, and not registered either: save_state() does not
save it.

Its number: the norm of the weights after training, resumed after the first epoch.

https://github.com/huggingface/accelerate/issues/2142
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
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if FIXED:
    accelerator.register_for_checkpointing(scheduler)  # WRONG without it
start = 0
if "--resume" in sys.argv:
    accelerator.load_state("state_0")
    start = 1

for epoch in range(start, 3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    scheduler.step()
    accelerator.save_state(f"state_{epoch}")
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
accelerator.print(f"norm of the weights: {norm:.8f}")
accelerator.end_training()
