"""A transformer with tied weights and texts of unequal length. The sum of the losses is divided by the tokens of all
processes, and DistributedDataParallel divides by their number once more.

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
tokens[torch.arange(9) >= torch.arange(96)[:, None] % 7 + 3] = 0
data = TensorDataset(tokens)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.embed(x), mask, is_causal=True))


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        count = (x[:, 1:] > 0).sum()
        dist.all_reduce(count)
        logits = model(x[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits, x[:, 1:].flatten(), ignore_index=0, reduction="sum")
        loss = total * (world_size if FIXED else 1) / count  # WRONG
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm().item()
if rank == 0:
    print(f"norm of the weights: {norm:.8f}")
dist.destroy_process_group()
