"""All processes have the same weights and the same test result: checked before a checkpoint, and after a test.

DDP averages the gradients of the parameters that it knew at its start. A layer that is thawed during the run, a
second `loss.backward()` beside accelerator.backward, or a rank that changes a weight leaves each process with a
model of its own, and no error. A test result that differs is of each process's own samples only, and by --save_best or
--patience each process would go its own way.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..console import stop


def check(accelerator: Accelerator, models: dict[str, nn.Module]) -> None:
    """Compare the parameters of all models. Collective.

    Sums of their bits as integers: sums of floating-point numbers depend on the order of the additions, which differs
    between devices. Not the buffers: BatchNorm statistics may differ until DDP broadcasts those of rank 0.

    Args:
        models: by name, whole on each process; sharded parameters are left out.

    Raises:
        SystemExit: on every rank, naming the first parameter that differs.
    """
    parameters = {
        f"{owner}.{name}": parameter.detach()
        for owner, model in models.items()
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "full_tensor")
    }
    if not parameters:
        return
    sums = torch.stack([sum_of_bits(parameter).to(accelerator.device) for parameter in parameters.values()])
    first, *others = accelerator.gather(sums[None]).tolist()
    for rank, theirs in enumerate(others, 1):
        for name, value, other in zip(parameters, first, theirs, strict=True):
            if value != other:
                stop(
                    f"the processes have different weights: {name} on rank {rank} is not that on rank 0. DDP averages "
                    "the gradients of what had requires_grad when prepare() was called, in accelerator.backward only: "
                    "thaw layers before prepare(), and call no other backward"
                )


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's values, each read as an integer of as many bits; int64, ()."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64)


def check_result(numbers: dict[str, float]) -> None:
    """Compare the numbers of a test. Collective.

    Raises:
        SystemExit: on every rank, naming the first number that differs by more than rounding.
    """
    everyone = gather_object([numbers])
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in sorted(first.keys() | theirs.keys()):
            value, other = first.get(name), theirs.get(name)
            if not is_close(value, other):
                stop(
                    f"the processes have different test results: {name} is {other} on rank {rank}, and {value} on rank "
                    "0; count by run.new_metrics(), or add the parts of all processes up by accelerator.reduce"
                )


def is_close(value: float | None, other: float | None) -> bool:
    """Whether two numbers differ by no more than rounding; None: there is none."""
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(value) and math.isnan(other))
