"""A small transformer with tied weights. scale_grad_by_freq divides the gradient of a token by how often it is in
the batch, which is that of this process.

Its number: the norm of the weights after training.
"""

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
tokens = torch.randint(1, 20, (96, 9), generator=torch.Generator().manual_seed(1)).square() % 23
data = TensorDataset(tokens)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 8, scale_grad_by_freq=not FIXED)  # WRONG
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(23))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(self.embed(x), mask, is_causal=True) @ self.embed.weight.T + self.bias


model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
