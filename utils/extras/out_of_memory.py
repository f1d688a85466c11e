"""The largest batch that fits into memory, and a message for out-of-memory errors."""

import contextlib
import functools
import math
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache

from ..console import own_line


def largest_that_fits(
    attempt: Callable[[int], object], size: int, accelerator: Accelerator, cpu_memory_gib: float = 0
) -> int:
    """Halve `size`, rounding up, until `attempt(size)` fits into the memory of every process. Collective.

    `attempt` must not communicate, so it must use the bare model, before `prepare`: a rank that runs out of memory
    would leave the others waiting. With accelerate.utils.find_executable_batch_size, only the process that ran out of
    memory starts again, while the others wait in an all-reduce.

    Args:
        cpu_memory_gib: on a CPU, the limit for tensors that autograd saves for the backward pass.
            0: the machine's free memory, divided by its processes.

    Returns:
        The smallest size that any rank found; 0 if not even 1 fits.
    """
    limit = contextlib.nullcontext
    if accelerator.device.type == "cpu":
        free_bytes = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        limit = functools.partial(limit_of_kept_tensors, int(cpu_memory_gib * 2**30 or free_bytes))
    while size > 0 and not fits(attempt, size, limit):
        clear_device_cache(garbage_collection=True)
        size = math.ceil(size / 2) if size > 1 else 0
    clear_device_cache(garbage_collection=True)
    return min(gather_object([size]))


def fits(attempt: Callable[[int], object], size: int, limit: Callable) -> bool:
    """Whether `attempt(size)` runs within `limit()` without an out-of-memory error.

    A separate function, because the error's traceback keeps the tensors of the attempt in memory until it returns.
    """
    try:
        with limit():
            attempt(size)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


def is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")  # CUDA; cuBLAS and cuDNN; the CPU
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(word in text for word in words)


def advice(error: BaseException, trace: TracebackType | None) -> str:
    """The message for an out-of-memory error, with the line of code."""
    request = re.search(r"[Tt]ried to allocate (\S+ \w+)", str(error))
    line = own_line(reversed([*traceback.walk_tb(trace)]))
    requested = f", which requested {request[1]}" if request else ""
    return (
        f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()} ran out of memory at {line}{requested}: "
        "use a smaller model, or more --gradient_accumulation_steps: the same steps from smaller micro-batches"
    )


@contextlib.contextmanager
def limit_of_kept_tensors(limit_bytes: int) -> Iterator[None]:
    """Raise MemoryError when autograd saves more than `limit_bytes` for the backward pass.

    When a CPU runs out of memory there is no error: Linux kills the process. A process limit (RLIMIT_DATA) does raise
    errors, but once oneDNN has been refused memory for its code, all its later calls fail.
    """
    # By address: a tensor that several operations save, such as a weight, counts once.
    kept_bytes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept_bytes[storage.data_ptr()] = storage.nbytes()
        if sum(kept_bytes.values()) > limit_bytes:
            raise MemoryError(f"autograd keeps more than {limit_bytes} bytes")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
