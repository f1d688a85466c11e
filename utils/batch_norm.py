"""BatchNorm statistics that do not depend on the number of processes.

BatchNorm normalises each micro-batch of a process by the statistics of that micro-batch. Gradients
therefore depend on the micro-batch size, and nothing can correct that afterwards. (SyncBatchNorm
computes the statistics over the micro-batches of all processes.)

What these functions do: P processes with k accumulation steps give exactly the weights and running
statistics of one process with P x k accumulation steps. For that, all micro-batches of an update
get the same weight, and an update changes the running statistics by `momentum` once:

    running = (1 - momentum) x running + momentum x mean of the micro-batches' statistics
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def weigh_batch_norms(
    model: nn.Module, micro_step: int, accumulation: int, momentum: float = 0.1
) -> None:
    """Set the momentum for micro-batch `micro_step`, so that all have the same weight in the end.

    Call it before the forward pass of each micro-batch, 0 to accumulation - 1. The last one gets
    momentum / accumulation. Each later micro-batch reduces the weight of the earlier ones, so they
    start with a larger momentum:

        momentum / accumulation / (1 - momentum x later micro-batches / accumulation)
    """
    if accumulation == 1:
        return
    later = accumulation - 1 - micro_step
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = momentum / accumulation / (1 - momentum * later / accumulation)


@torch.no_grad()
def average_batch_norms(model: nn.Module, accelerator: Accelerator) -> None:
    """Average the running statistics over the processes. Collective: call it once an update.

    DDP's broadcast_buffers copies those of process 0 to all others instead, and what the others
    computed is lost. All statistics are averaged in one all-reduce.
    """
    if accelerator.num_processes == 1:
        return
    statistics = []
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            statistics += [module.running_mean, module.running_var]
    if not statistics:
        return
    means = accelerator.reduce(torch.cat(statistics), "mean")
    means = means.split([len(tensor) for tensor in statistics])
    torch._foreach_copy_(statistics, list(means))
