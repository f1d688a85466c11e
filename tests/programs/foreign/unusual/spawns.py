"""Starts a process for each GPU, as PyTorch's tutorial on several GPUs does."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, world_size, epochs):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of somebody else
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    inputs = torch.randn(300, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, world_size, rank))
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


def main():
    world_size = torch.cuda.device_count()
    mp.spawn(train, args=(world_size, 2), nprocs=world_size)
    os.rename("model.pt", "final.pt")  # by the process that has started the others, alone


if __name__ == "__main__":
    main()
