"""In the style of PyTorch's mnist example, on one process: nothing in it knows of others."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
