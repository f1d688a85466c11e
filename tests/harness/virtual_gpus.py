"""GPUs that a CPU stands in for: nn.DataParallel scatters, replicates and gathers for real.

Only what needs CUDA is replaced: the copies from GPU to GPU, and the threads with their streams.
All else is torch's own: how arguments are split, how the replicas are built, that the first one has
the model's own weights and buffers, and where the outputs are put together.
"""

import importlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from torch import nn

from utils import accelerator, banner, launched
from utils.parallel import data_parallel, virtual_processes


class Broadcast(torch.autograd.Function):
    """Copies of tensors for each GPU; the first one has them already. Backward: their sums."""

    @staticmethod
    def forward(ctx, count, *tensors):
        ctx.num_tensors = len(tensors)
        copies = [*tensors, *(tensor.clone() for _ in range(count - 1) for tensor in tensors)]
        learns = ctx.needs_input_grad[1:] * count
        frozen = [copy for copy, needed in zip(copies, learns, strict=True) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx, *gradients):
        sums = [sum(gradients[first :: ctx.num_tensors]) for first in range(ctx.num_tensors)]
        return None, *sums


def broadcast(tensors, devices, detach=False):
    """What replicas are made of: a list of tensors for each GPU."""
    if detach:
        return [[tensor if gpu == 0 else tensor.clone() for tensor in tensors] for gpu in devices]
    if not tensors:
        return []
    copies = Broadcast.apply(len(devices), *tensors)
    return [copies[gpu * len(tensors) : (gpu + 1) * len(tensors)] for gpu in devices]


def scatter(devices, sizes, dim, tensor):
    return tuple(part.clone() for part in tensor.chunk(len(devices), dim))


def gather(device, dim, *tensors):
    return torch.cat([tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors], dim)


def parallel_apply(functions, inputs, kwargs=None, devices=None):
    """Each function in a new thread, which knows nothing of the autocast of this one."""
    grad_enabled = torch.is_grad_enabled()

    def run(function, args, kwargs):
        args = args if isinstance(args, (list, tuple)) else (args,)
        with torch.set_grad_enabled(grad_enabled):
            return function(*args, **kwargs)

    kwargs = kwargs or [{} for _ in functions]
    assert len(functions) == len(inputs) == len(kwargs) == len(devices)
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions, inputs, kwargs))


def install(setattr, count: int) -> SimpleNamespace:
    """Have one process see `count` GPUs until `setattr`, pytest's, is undone.

    Returns:
        What happens: `parts`, the samples of each GPU in each call.
    """
    # torch.nn.parallel has functions by the names of these modules.
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    replicate = importlib.import_module("torch.nn.parallel.replicate")
    functions = importlib.import_module("torch.nn.parallel._functions")
    seen = SimpleNamespace(parts=[])

    def watched_apply(functions, inputs, kwargs, devices):
        sizes = []
        for args, named in zip(inputs, kwargs, strict=True):
            tensors = [value for value in (*args, *named.values()) if torch.is_tensor(value)]
            sizes.append(len(tensors[0]) if tensors else 0)
        seen.parts.append(sizes)
        return parallel_apply(functions, inputs, kwargs, devices)

    original_init = nn.DataParallel.__init__

    def init(self, *args, **kwargs):
        original_init(self, *args, **kwargs)
        self.src_device_obj = torch.device("cpu")  # forward() checks that the weights are there

    setattr(module, "_get_available_device_type", lambda: "cuda")
    setattr(module, "_get_all_device_indices", lambda: list(range(count)))
    setattr(module, "_check_balance", lambda device_ids: None)
    setattr(module, "parallel_apply", watched_apply)
    setattr(nn.parallel, "parallel_apply", parallel_apply)
    setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    setattr(functions.Scatter, "apply", scatter)
    setattr(functions.Gather, "apply", gather)
    setattr(nn.DataParallel, "__init__", init)
    for user in (accelerator, banner, data_parallel, launched, virtual_processes):
        setattr(user, "data_parallel_gpus", lambda accelerator: count)
    return seen
