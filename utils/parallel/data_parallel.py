"""nn.DataParallel (dp.yaml), and DistributedDataParallel with the same order of additions in all launches of a run."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ..console import stop
from ..launched import data_parallel_gpus


def data_parallel(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap the model in nn.DataParallel if this process has several GPUs. `accelerator.prepare` calls it."""
    if data_parallel_gpus(accelerator) < 2 or isinstance(model, nn.DataParallel):
        return model
    if is_compiled_module(model) or model._compiled_call_impl is not None:  # replicas would run the original module
        stop("torch.compile does not work with DataParallel (dp.yaml): leave it out, or use ddp.yaml")
    autocast = accelerator.autocast if accelerator.mixed_precision != "no" else None
    return DataParallel(model.to(accelerator.device), autocast)


class DataParallel(nn.DataParallel):
    """nn.DataParallel whose replicas compute in the precision of the config file.

    Autocast is a setting of each thread, and each replica has its own thread. torch enables autocast there, but with
    float16, whatever the main thread uses.

    Args:
        autocast: returns a context manager that is also a decorator; None: full precision.
    """

    def __init__(self, module: nn.Module, autocast: Callable | None = None):
        super().__init__(module)
        self.autocast = autocast

    def replicate(self, module: nn.Module, device_ids: list) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        if self.autocast is not None:
            for replica in replicas:
                replica.forward = convert_outputs_to_fp32(self.autocast()(replica.forward))  # as `prepare`
        return replicas


class SumOfParameters(nn.Module):
    """The model, with a forward pass that gives a zero gradient to every parameter, in reverse order."""

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
