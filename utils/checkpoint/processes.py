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
        except (OSError, SystemExit) as error:
            problem = error
    result, problem = broadcast_object_list([result, problem])
    if isinstance(problem, OSError):
        stop(f"{problem.filename or 'a file'}: {problem.strerror or problem}")
    if problem is not None:  # work() already said why
        raise problem
    return result


def random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The states of the global generators of torch, Python and NumPy."""
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

    On a different number of processes the random states stay as they are, because they belong to a
    process, and the first process takes the metrics of all.

    Args:
        tensors: as <rank>/<name>, random states and metrics of the `num_processes` that saved.
    """
    states, metrics = ([{} for _ in range(num_processes)] for _ in range(2))
    for key, tensor in tensors.items():
        saved_rank, _, name = key.partition("/")
        (states if name.startswith("random_") else metrics)[int(saved_rank)][name] = tensor
    rank = accelerator.process_index
    if num_processes == accelerator.num_processes:
        set_random_states(accelerator, states[rank])
        return metrics[rank]
    names = sorted(set().union(*metrics))
    joined = {name: torch.cat([saved[name] for saved in metrics if name in saved]) for name in names}
    # Elsewhere no samples, under the same names: `Metrics.reduce` needs the same ones on all processes.
    return joined if rank == 0 else {name: tensor[:0] for name, tensor in joined.items()}
