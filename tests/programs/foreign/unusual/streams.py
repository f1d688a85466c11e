"""A stream that Accelerate reads on one process and hands out to all."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(90):
            points = torch.randn(8, generator=generator)
            yield {"points": points, "labels": (points.sum() > 0).long()}


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["points"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
