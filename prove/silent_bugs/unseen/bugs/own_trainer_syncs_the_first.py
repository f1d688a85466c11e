"""A trainer class in the style of Lightning accumulates two micro-batches, and turns the averaging off for the second
one instead of the first: the second gradient stays on its process.

Its number: the norm of the weights after training.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Fit:
    """A small Trainer: hooks around a loop."""

    def __init__(self, module, lr, window):
        self.model = DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.window = window

    def run(self, data, epochs):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
        for self.epoch in range(epochs):
            sampler.set_epoch(self.epoch)
            for number, batch in enumerate(loader):
                self.training_step(number, *batch)
            self.epoch_end()

    def training_step(self, number, x, y):
        is_last = number % self.window == self.window - 1
        self.model.require_backward_grad_sync = is_last if FIXED else not is_last  # WRONG
        self.loss = F.mse_loss(self.model(x), y) / self.window
        self.loss.backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def epoch_end(self):
        if rank == 0:
            print(f"epoch {self.epoch}: loss {self.loss.item() * self.window:.4f}")


fit = Fit(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), lr=0.05, window=2)
fit.run(data, epochs=2)
model = fit.model

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
