"""BatchNorm over micro-batches and processes: running statistics that do not depend on how an update was cut up.

BatchNorm normalises by the statistics of the piece that is in its forward pass, so that a gradient depends on the size
of the pieces; no rule undoes that (SyncBatchNorm makes one piece of all processes' pieces). What can be had: P
processes with k micro-batches are exactly one process with P x k micro-batches, in weights and in running statistics.
For that, all pieces of an update count alike, and an update moves the running statistics by `momentum` once:

    running = (1 - momentum) x running + momentum x mean of the pieces' statistics
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def weigh_batch_norms(model: nn.Module, micro_step: int, accumulation: int, momentum: float = 0.1) -> None:
    """Set the momentum for micro-batch `micro_step` of `accumulation`, so that all of them count alike in the end.

    The last one weighs momentum / accumulation. Those before it are made smaller by each one that follows, and so begin
    with more: by 1 / (1 - momentum x followers / accumulation).
    """
    if accumulation == 1:
        return
    followers = accumulation - 1 - micro_step
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = momentum / accumulation / (1 - momentum * followers / accumulation)


@torch.no_grad()
def average_batch_norms(model: nn.Module, accelerator: Accelerator) -> None:
    """Average the running statistics over the processes, once an update. A collective, one for all of them.

    DDP's own way (broadcast_buffers) hands out those of process 0, and what the others saw is lost.
    """
    if accelerator.num_processes == 1:
        return
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = [tensor for module in modules for tensor in (module.running_mean, module.running_var)]
    if statistics:
        means = accelerator.reduce(torch.cat(statistics), "mean").split([len(tensor) for tensor in statistics])
        torch._foreach_copy_(statistics, list(means))
