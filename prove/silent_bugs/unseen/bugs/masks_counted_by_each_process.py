"""A masked diffusion of tokens: each sample draws how many of its tokens are masked, and which. The loss is the mean
over the masked tokens of this process, and a token weighs more where few others are masked.

Its number: what a token weighs, at most, compared with one of another process in the same step.

https://github.com/google/tunix/pull/1744
https://github.com/PrimeIntellect-ai/prime-rl/pull/1957
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
MASK = 16

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 4, (96, 1)).add(torch.arange(8)) % 16)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)

layers = [nn.Embedding(17, 8), nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 128), nn.Unflatten(1, (8, 16))]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1 + rank)
weights = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (tokens,) in loader:
        rate = torch.rand(len(tokens), 1, generator=generator).clamp(min=0.1)
        masked = torch.rand(tokens.shape, generator=generator) < rate
        masked[:, 0] = True
        logits = model(tokens.where(~masked, MASK))
        each = F.cross_entropy(logits[masked], tokens[masked], reduction="none")
        each.retain_grad()
        count = masked.sum().float()
        if FIXED:
            dist.all_reduce(count)  # WRONG without it
            count /= world_size
        loss = each.sum() / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(each.grad[0])
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [torch.empty(len(weights)) for _ in range(world_size)]
dist.all_gather(every, torch.stack(weights))
every = torch.stack(every)
if rank == 0:
    print(f"a token weighs at most {(every.amax(0) / every.amin(0)).max().item():.6f} times as much")
dist.destroy_process_group()
