"""Metrics of three ranks, of which rank 1 has no sample and rank 2 a bad loss at the end."""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.accelerator import TrainingAccelerator
from utils.metrics import Metrics
from utils.sample_metrics import gather_samples

accelerator = TrainingAccelerator(cpu=True)
rank = accelerator.process_index
# 4 samples on rank 0, none on rank 1, 2 on rank 2.
own = [[torch.tensor([-1, 2]), torch.tensor([-3, -4])], [torch.zeros(0, dtype=torch.int64)], [torch.tensor([5, 0])]][
    rank
]
assert gather_samples(accelerator, own).tolist() == [-1, 2, -3, -4, 5, 0]
boxes = [part.double()[:, None].expand(-1, 3) / 7 for part in own]
together = gather_samples(accelerator, boxes)
assert together.shape == (6, 3)
assert together.dtype == torch.float64
assert torch.equal(together[:, 2], torch.tensor([-1, 2, -3, -4, 5, 0], dtype=torch.float64) / 7)
assert gather_samples(accelerator, [part > 0 for part in own]).tolist() == [0, 1, 0, 0, 1, 0]
assert gather_samples(accelerator, [torch.zeros(0)]).shape == (0,)

stats = Metrics(accelerator)
for part in own:

    class Batch:
        indices, weights, counted = part, None, lambda self, values: values

        def __len__(self):
            return len(self.indices)

    stats.add(Batch(), loss=part.float(), weights=part.abs())
means = stats.reduce()
assert means == {"loss": (-1 + 4 - 9 - 16 + 25) / 15, "samples": 6}, means

# Rank 1 adds nothing, and rank 0 a metric that rank 2 lacks.
accelerator.layout = dataclasses.replace(accelerator.layout, split_batch=False)
stats = Metrics(accelerator)
if rank == 2:
    stats.add(Batch(), loss=torch.tensor([1.0, 2.0]))
elif rank == 0:
    batch = Batch()
    stats.add(batch, hit=torch.tensor([1.0, 0.0]))
    stats.add(batch, loss=3.0, weights=torch.tensor([0.0, 0.5]))
means = stats.reduce()
assert means == {"loss": (1 + 2 + 1.5) / 2.5, "hit": 0.5, "samples": 4}, means
assert list(means) == ["loss", "hit", "samples"]

stats = Metrics(accelerator)
batch = Batch()
stats.add(batch, loss=torch.where(batch.indices == 5, torch.nan, 1.0), step=9)
try:
    stats.reduce()
except SystemExit as stopped:
    if stopped.code != 2:
        raise RuntimeError(stopped.code) from stopped
else:
    raise AssertionError("a bad loss went on")
accelerator.end_training()
