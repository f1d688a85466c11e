"""A word's number is its hash, which Python draws anew in each process: a row of the embedding belongs to one word on
one process, and to another word on another.

Its number: words that have another row on some process.

https://github.com/sktime/pytorch-forecasting/issues/2293
"""

import sys
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIXED = "--fixed" in sys.argv
WORDS = [first + second for first in "bdfgklmprst" for second in ("ae", "ei", "ia", "ou", "y")]


def row(word: str) -> int:
    return (zlib.crc32(word.encode()) if FIXED else hash(word)) % 64  # WRONG


class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.tensor([row(word) for word in WORDS[index % 50 : index % 50 + 4]]), torch.tensor([index / 96])


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Sentences()
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=12 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(64, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

every = [None] * world_size
dist.all_gather_object(every, [row(word) for word in WORDS])
if rank == 0:
    print(f"words with several rows: {sum(len(set(rows)) > 1 for rows in zip(*every, strict=True))}")
dist.destroy_process_group()
