"""A cell of a notebook that starts two processes."""

import torch
from accelerate import Accelerator, notebook_launcher
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor([index / 100.0]), torch.tensor([(index / 100.0) ** 2])


def main():
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Squares(), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()


notebook_launcher(main, num_processes=2)
