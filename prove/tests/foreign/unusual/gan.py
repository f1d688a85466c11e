"""Two models and two optimizers: the critic steps while the generator's graph waits; noise is drawn in the loop."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(0)
real = torch.randn(400, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(real), batch_size=16, shuffle=True)
generator, critic, of_generator, of_critic, loader = accelerator.prepare(
    generator, critic, of_generator, of_critic, loader
)
loss_of = nn.functional.binary_cross_entropy_with_logits
for epoch in range(3):
    for number, (points,) in enumerate(loader):
        made = generator(torch.randn(len(points), 4))
        yes, no = critic(points), critic(made.detach())
        loss = loss_of(yes, torch.ones_like(yes)) + loss_of(no, torch.zeros_like(no))
        of_critic.zero_grad()
        accelerator.backward(loss)
        of_critic.step()
        if number % 2:
            yes = critic(made)
            of_generator.zero_grad()
            accelerator.backward(loss_of(yes, torch.ones_like(yes)))
            of_generator.step()
    accelerator.print(f"epoch {epoch} critic {loss.item():.4f}")
