"""All processes have the same weights: checked before a checkpoint is saved.

DDP averages the gradients of the parameters that it knew at its start. A layer that is thawed during the run, a
second `loss.backward()` beside accelerator.backward, or a rank that changes a weight leaves each process with a
model of its own, and no error.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..console import stop


def check(accelerator: Accelerator, models: dict[str, nn.Module]) -> None:
    """Compare the sums of the weights. Collective.

    Args:
        models: by name, whole on each process; those with sharded parameters are left out.

    Raises:
        SystemExit: on every rank, naming the first parameter that differs.
    """
    parameters = {
        f"{owner}.{name}": parameter.detach()
        for owner, model in models.items()
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "full_tensor") and not parameter.is_complex()
    }
    total = sum(float(parameter.sum(dtype=torch.float64)) for parameter in parameters.values())
    limits = torch.tensor([total, -total], dtype=torch.float64)
    if accelerator.device.type != "cpu":
        limits = limits.to(accelerator.device)
    torch.distributed.all_reduce(limits, torch.distributed.ReduceOp.MAX)
    if limits[0] == -limits[1] or limits.isnan().any():  # a loss that is not finite stops the run elsewhere
        return
    sums = {name: float(parameter.sum(dtype=torch.float64)) for name, parameter in parameters.items()}
    everyone = gather_object([sums])
    for name in sums:
        for rank, theirs in enumerate(everyone):
            if theirs[name] != everyone[0][name]:
                stop(
                    f"the processes have different weights: {name} on rank {rank} is not that on rank 0. DDP averages "
                    "the gradients of what had requires_grad when prepare() was called, in accelerator.backward only: "
                    "thaw layers before prepare(), and call no other backward"
                )
