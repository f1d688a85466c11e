"""Averages gradients as WaveGlow and Tacotron 2 do: a hook of each parameter queues one reduction after backward."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    for value in model.state_dict().values():
        dist.broadcast(value, 0)

    def reduce():
        if not model.needs_reduction:
            return
        model.needs_reduction = False
        gradients = [parameter.grad.data for parameter in model.parameters() if parameter.grad is not None]
        joined = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(joined)
        joined /= dist.get_world_size()
        for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(joined, gradients), strict=True):
            gradient.copy_(mean)

    def queue(*_):
        torch.autograd.Variable._execution_engine.queue_callback(reduce)

    def begin(*_):
        model.needs_reduction = True

    for parameter in model.parameters():
        parameter.register_hook(queue)
    model.register_forward_hook(begin)
    return model


def train():
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model, sampler = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), None
    if world_size > 1:
        dist.init_process_group("gloo")
        model, sampler = average_gradients(model), DistributedSampler(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=16, shuffle=sampler is None, sampler=sampler, drop_last=True)
    for epoch in range(2):
        if sampler:
            sampler.set_epoch(epoch)
        for x, y in loader:
            model.zero_grad()
            loss = F.mse_loss(model(x), y)
            reported = loss.data.clone()
            if world_size > 1:
                dist.all_reduce(reported)
            loss.backward()
            optimizer.step()
            print(f"loss {reported.item() / world_size:.4f}")


if __name__ == "__main__":
    train()
