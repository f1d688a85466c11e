"""Processes with different numbers of batches, which wait for each other with Join."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    torch.manual_seed(0)
    points = torch.randn(200, 8)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        with accelerator.join_uneven_inputs([model]):
            for batch, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
                optimizer.step()


if __name__ == "__main__":
    main()
