"""A trainer class keeps the weights of the epoch with the best loss, and restores them at the end. Each process takes
the loss of its own last batch, and process 0 saves what was best for it.

Its number: the norm of the weights after training.
"""

import copy
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
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.total = loss.detach()

    def epoch_end(self):
        if FIXED:
            dist.all_reduce(self.total)  # WRONG without it
            self.total /= world_size
        if self.total < getattr(self, "best", torch.inf):
            self.best, self.kept = self.total, copy.deepcopy(self.model.state_dict())
        if rank == 0:
            print(f"epoch {self.epoch}: loss {self.total.item():.4f}")


fit = Fit(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), lr=0.2, window=1)
fit.run(data, epochs=6)
model = fit.model
model.load_state_dict(fit.kept)

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
