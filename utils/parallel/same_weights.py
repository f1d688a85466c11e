"""Checks that all processes have the same weights (before a checkpoint) and the same test result (after a test).

DDP averages the gradients of the parameters that required them when it was created. If a layer is unfrozen later, a
script calls `loss.backward()` directly, or one rank changes a weight, the models drift apart without an error. A test
result that differs covers only the process's own samples, and --save_best or --patience would act on it.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..console import stop


def check(accelerator: Accelerator, models: dict[str, nn.Module]) -> None:
    """Compare the parameters of all models, except sharded ones. Collective.

    What is compared is the sum of their bits as integers, because a floating-point sum depends on the order of
    additions, which differs between devices. Buffers are skipped: BatchNorm statistics may differ until DDP broadcasts
    rank 0's.

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
    for rank, sums_of_rank in enumerate(others, 1):
        for name, value, other in zip(parameters, first, sums_of_rank, strict=True):
            if value != other:
                stop(
                    f"the processes have different weights: {name} differs between rank 0 and rank {rank}. DDP "
                    "averages gradients only in accelerator.backward, and only of parameters that had requires_grad "
                    "when prepare() was called: unfreeze layers before prepare(), and call no other backward"
                )


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's values, each reinterpreted as an integer of the same size; int64, ()."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64)


def check_result(numbers: dict[str, float]) -> None:
    """Compare the numbers of a test. Collective.

    Raises:
        SystemExit: on every rank, naming the first number that differs by more than rounding.
    """
    results = gather_object([numbers])
    first = results[0]
    for rank, result in enumerate(results):
        for name in sorted(first.keys() | result.keys()):
            value, other = first.get(name), result.get(name)
            if not is_close(value, other):
                stop(
                    f"the processes have different test results: {name} is {other} on rank {rank}, and {value} on rank "
                    "0; use run.new_metrics(), or add up the parts of all processes with accelerator.reduce"
                )


def is_close(value: float | None, other: float | None) -> bool:
    """Whether two numbers, or two missing ones, differ by no more than rounding."""
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-3, abs_tol=1e-6) or (math.isnan(value) and math.isnan(other))
