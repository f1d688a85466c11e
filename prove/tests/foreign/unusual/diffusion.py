"""A diffusion model in the style of diffusers: noise and time steps of a generator that each process seeds."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
images = torch.randn(400, 16).cumsum(1)
model = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16))
loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
draws = torch.Generator().manual_seed(accelerator.process_index)
kept = torch.linspace(0.99, 0.01, 100)
for epoch in range(3):
    for (clean,) in loader:
        noise = torch.randn(clean.shape, generator=draws)
        timesteps = torch.randint(0, 100, (len(clean),), generator=draws)
        part = kept[timesteps, None]
        noisy = part.sqrt() * clean + (1 - part).sqrt() * noise
        loss = nn.functional.mse_loss(model(torch.cat([noisy, timesteps[:, None] / 100], 1)), noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
