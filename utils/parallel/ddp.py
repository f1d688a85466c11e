"""DistributedDataParallel with the same order of additions in all launches of a run."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class SumOfParameters(nn.Module):
    """The model, with a forward pass that gives each parameter a gradient of zeros: the last one first."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, total: float) -> torch.Tensor:
        sparse = {m.weight for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
        used = [p for p in self.model.parameters() if p.requires_grad]
        used = [F.embedding(p.new_zeros(1, dtype=torch.int64), p, sparse=True) if p in sparse else p for p in used]
        return sum((p * 0).abs().sum() for p in used) + total


def fix_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP fill its buckets in the same order in all steps of all launches. Collective.

    With three or more processes, the order of additions in an all-reduce depends on a gradient's place in its bucket.
    After the first backward pass of a launch, DDP fills the buckets anew, in the order in which gradients were ready.
    Without this, the first step after resuming would differ in its last bits from an uninterrupted run. So one backward
    pass with zero gradients runs before training.
    """
    if ddp.find_unused_parameters:  # the buckets stay as they are
        return
    model = ddp.module
    ddp.module = SumOfParameters(model)
    ddp(0.0).backward()  # with an argument: on GPUs, DDP needs one
    ddp.module = model
    ddp.reducer._rebuild_buckets()  # no public API; a collective that would be part of the next forward pass
    ddp.zero_grad()
