"""What the processes of a run exchange for a checkpoint, and what belongs to one process alone."""

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..console import stop


def on_main(accelerator: Accelerator, work: Callable):
    """Do `work()` on the main process and return its result on all processes. Collective.

    Raises:
        SystemExit: on every process, if it fails with OSError or SystemExit: none is left waiting.
    """
    result = problem = None
    if accelerator.is_main_process:
        try:
            result = work()
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror or error}"
        except SystemExit as error:  # work() already said why
            problem = error
    result, problem = broadcast_object_list([result, problem])
    if isinstance(problem, SystemExit):
        raise problem
    if problem:
        stop(problem)
    return result


def gather_first_copy(accelerator: Accelerator, model_copy: int | None, entries: dict) -> dict:
    """On the main process, the entries of all processes that share copy 0 of the model. Collective.

    Args:
        model_copy: which copy of the model this process has parameters of; None: the entries are
            those of a whole model and are returned as they are.
        entries: by parameter name, tensors or JSON.
    """
    if model_copy is None or accelerator.num_processes == 1:
        return entries
    gathered = [None] * accelerator.num_processes if accelerator.is_main_process else None
    mine = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
    torch.distributed.gather_object(mine if model_copy == 0 else {}, gathered)
    for others in gathered or []:
        entries = entries | others
    return entries


def random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The states of the global generators of torch, Python and NumPy, so that what a training loop
    draws from them goes on."""
    _, python, python_gauss = random.getstate()
    python_gauss = math.nan if python_gauss is None else python_gauss
    _, numpy, position, has_gauss, numpy_gauss = np.random.get_state()
    states = {
        "random_cpu": torch.get_rng_state(),
        "random_python": torch.tensor(python),
        "random_numpy": torch.tensor([position, has_gauss, *numpy.tolist()]),
        # Both draw normal numbers in pairs, and keep the second one. NaN: Python has none.
        "random_gauss": torch.tensor([python_gauss, numpy_gauss], dtype=torch.float64),
    }
    if accelerator.device.type == "cuda":
        states["random_cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def set_random_states(accelerator: Accelerator, states: dict[str, torch.Tensor]) -> None:
    """The inverse of `random_states`."""
    torch.set_rng_state(states["random_cpu"])
    version, _, _ = random.getstate()
    python_gauss, numpy_gauss = states["random_gauss"].tolist()
    python_gauss = None if math.isnan(python_gauss) else python_gauss
    random.setstate((version, tuple(states["random_python"].tolist()), python_gauss))
    position, has_gauss, *numpy = states["random_numpy"].tolist()
    np.random.set_state(("MT19937", np.array(numpy, dtype=np.uint32), position, has_gauss, numpy_gauss))
    if accelerator.device.type == "cuda" and "random_cuda" in states:
        torch.cuda.set_rng_state(states["random_cuda"], accelerator.device)


def restore_process(
    accelerator: Accelerator, tensors: dict[str, torch.Tensor], num_processes: int
) -> dict[str, torch.Tensor]:
    """Set the random states of this process, and return its metrics.

    On a different number of processes the random states, which belong to a process, stay as they
    are, and the first process takes the metrics of all.

    Args:
        tensors: random states and metrics of the processes that saved, as <rank>/<name>.
        num_processes: how many these were.
    """
    states, metrics = ([{} for _ in range(num_processes)] for _ in range(2))
    for key, tensor in tensors.items():
        saved_rank, _, name = key.partition("/")
        kind = states if name.startswith("random_") else metrics
        kind[int(saved_rank)][name] = tensor
    rank = accelerator.process_index
    if num_processes == accelerator.num_processes:
        set_random_states(accelerator, states[rank])
        return metrics[rank]
    if rank == 0:
        names = sorted(set().union(*metrics))
        return {name: torch.cat([saved[name] for saved in metrics if name in saved]) for name in names}
    # No samples, under the same names: `Metrics.reduce` needs the same ones on all processes.
    return {name: tensor[:0] for name, tensor in metrics[0].items()}
