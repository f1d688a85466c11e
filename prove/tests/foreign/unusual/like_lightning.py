"""Remakes its loader with the arguments of the script, steps two optimizers inside a forward pass, and saves lists."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 3


def _reinstantiate_wrapped_cls(orig_object, *args, **kwargs):
    return type(orig_object)(*args, **kwargs)


def distributed(loader: DataLoader, data, batch_size: int) -> DataLoader:
    return _reinstantiate_wrapped_cls(
        loader, data, batch_size=batch_size, sampler=DistributedSampler(data, drop_last=True)
    )


class Module(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        *parameters, bias = model.parameters()
        self.optimizers = torch.optim.AdamW(parameters, 1e-3), torch.optim.SGD([bias], 0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], EPOCHS)

    def forward(self, points, targets):
        loss = F.mse_loss(self.model(points).flatten(), targets)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 8), nn.SyncBatchNorm(8), nn.Linear(8, 1))
    module = Module(DistributedDataParallel(model))
    points = torch.randn(200, 4)
    data = list(zip(points, points.sum(1), strict=True))
    loader = distributed(DataLoader(data, 16, shuffle=True), data, 16)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader)):  # never reads on after the last batch
            module(*next(batches))
        module.schedule.step()
        if os.environ["RANK"] == "0":
            states = {"optimizer_states": [each.state_dict() for each in module.optimizers]}
            states |= {"schedules": [module.schedule.state_dict()]}
            torch.save({"epoch": epoch, "state_dict": module.model.module.state_dict(), **states}, "last.ckpt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
