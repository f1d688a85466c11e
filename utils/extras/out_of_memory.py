"""How much memory training takes, and the largest batch that fits into the memory there is."""

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
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from ..console import own_line


def largest_that_fits(
    attempt: Callable[[int], object], size: int, accelerator: Accelerator, cpu_memory_gib: float = 0
) -> int:
    """Halve `size`, rounding up, until `attempt(size)` fits into the memory of every process.

    A collective: call it on every rank. All ranks return the same number, the smallest that any of
    them found; 0 if not even 1 fits. `attempt` itself must not communicate, so it must use the bare
    model, before `prepare`. If it did, a rank that runs out of memory would leave the others
    waiting in an all-reduce.

    cpu_memory_gib: on a CPU, the limit for the tensors that autograd keeps for the backward pass.
        0: the free memory of the machine, divided by its processes.

    accelerate.utils.find_executable_batch_size is not enough. Only the process that ran out of
    memory starts again, with 0.9 of the batch size, while the others wait in their all-reduce. If
    all of them ran out at the same time, each step uses a smaller batch from then on. The test
    for an out-of-memory error is taken from there.
    """
    if accelerator.device.type == "cpu":
        free_bytes = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        limit_bytes = int(cpu_memory_gib * 2**30 or free_bytes)
        limit = functools.partial(limit_of_kept_tensors, limit_bytes)
    else:
        limit = contextlib.nullcontext

    while size > 0 and not fits(attempt, size, limit):
        clear_device_cache(garbage_collection=True)
        size = math.ceil(size / 2) if size > 1 else 0
    clear_device_cache(garbage_collection=True)
    return min(gather_object([size]))


def fits(attempt: Callable[[int], object], size: int, limit: Callable) -> bool:
    """Whether `attempt(size)` runs within `limit()` without an out-of-memory error.

    This is a function of its own so that the error is gone when it returns. The error's traceback
    would keep the tensors of the attempt in memory.
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
    """Whether an error means that memory ran out; ALLOC_FAILED is cuBLAS's and cuDNN's word."""
    if not isinstance(error, Exception):
        return False
    if isinstance(error, MemoryError) or "ALLOC_FAILED" in str(error):
        return True
    return should_reduce_batch_size(error)


def advice(error: BaseException, trace: TracebackType | None) -> str:
    """The sentence for an out-of-memory error, with the line of code."""
    tried = re.search(r"[Tt]ried to allocate (\S+ \w+)", str(error))
    line = own_line(reversed([*traceback.walk_tb(trace)]))
    asked = f", which asked for {tried[1]}" if tried else ""
    return (
        f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()} ran out of memory at {line}{asked}: "
        "take a smaller model, or more --gradient_accumulation_steps, which make the same step of smaller micro-batches"
    )


@contextlib.contextmanager
def limit_of_kept_tensors(limit_bytes: int) -> Iterator[None]:
    """Raise MemoryError as soon as autograd keeps more than `limit_bytes` for the backward pass.

    On a CPU there is no error when memory runs out: Linux promises more memory than it has, and
    kills the process that uses it. A limit of the process (RLIMIT_DATA) does give errors, but after
    oneDNN was refused memory for its code once, it fails in every later call.
    """
    # By address: a tensor that several operations keep, such as a weight, counts once.
    kept_bytes = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept_bytes[storage.data_ptr()] = storage.nbytes()
        if sum(kept_bytes.values()) > limit_bytes:
            raise MemoryError(f"autograd keeps more than {limit_bytes} bytes")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
