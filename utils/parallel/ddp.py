"""DistributedDataParallel with the same order of additions in every launch of a run."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SumOfParameters(nn.Module):
    """A forward pass through which each parameter gets a gradient of zeros, the last parameter first."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward(self) -> torch.Tensor:
        total = 0.0
        for parameter in self.trained:
            total = total + (parameter * 0).abs().sum()
        return total


def fix_buckets(model: DistributedDataParallel) -> None:
    """Have DDP fill its buckets in the same order in all steps of all launches. Collective.

    With three or more processes, the order of additions in an all-reduce depends on a gradient's place in its bucket.
    After the first backward pass of a launch, DDP fills the buckets anew, in the order in which gradients were ready.
    So the first step of a resumed run would have other bits than the same step of a run that was not interrupted. Here
    that backward pass is one before training, in which the gradients of all parameters are zero.
    """
    if model.find_unused_parameters:  # the buckets stay as they are
        return
    module, model.module = model.module, SumOfParameters(model.module)
    model().backward()
    model.module = module
    for parameter in module.parameters():
        parameter.grad = None
