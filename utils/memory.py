"""Peak memory, the largest batch that fits, and a message for out-of-memory errors."""

import contextlib
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache


def own_peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process in GiB: of the tensors on its fullest NVIDIA or AMD GPU; otherwise of everything."""
    if device.type == "cuda":
        return max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) / 2**30
    if sys.platform == "linux":
        # Not getrusage, whose peak includes the launcher's memory from before this program started.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    import resource  # Windows does not have it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # in bytes on macOS


def peak_memory_gib(accelerator: Accelerator) -> float:
    """The largest `own_peak_memory_gib` of all processes. Collective."""
    return max(gather_object([own_peak_memory_gib(accelerator.device)]))


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
    limit_bytes = math.inf
    if accelerator.device.type == "cpu":
        free_bytes = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        limit_bytes = cpu_memory_gib * 2**30 or free_bytes
    while size > 0 and not fits(attempt, size, limit_bytes):
        clear_device_cache(garbage_collection=True)
        size = math.ceil(size / 2) if size > 1 else 0
    clear_device_cache(garbage_collection=True)
    return min(gather_object([size]))


def fits(attempt: Callable[[int], object], size: int, limit_bytes: float) -> bool:
    """Whether `attempt(size)` runs without an out-of-memory error.

    A separate function, because the error's traceback keeps the tensors of the attempt in memory until it returns.
    """
    try:
        with limit_of_kept_tensors(limit_bytes):
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


def advice(error: BaseException, line: str) -> str:
    request = re.search(r"[Tt]ried to allocate (\S+ \w+)", str(error))
    requested = f", which requested {request[1]}" if request else ""
    return (
        f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()} ran out of memory at {line}{requested}: "
        "use a smaller model, or more --gradient_accumulation_steps: the same steps from smaller micro-batches"
    )


@contextlib.contextmanager
def limit_of_kept_tensors(limit_bytes: float) -> Iterator[None]:
    """Raise MemoryError when autograd saves more than `limit_bytes` for the backward pass.

    When a CPU runs out of memory there is no error: Linux kills the process. A process limit (RLIMIT_DATA) does raise
    errors, but once oneDNN has been refused memory for its code, all its later calls fail.
    """
    kept_bytes = {}  # by address: a tensor that several operations save, such as a weight, counts once

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept_bytes[storage.data_ptr()] = storage.nbytes()
        if sum(kept_bytes.values()) > limit_bytes:
            raise MemoryError(f"autograd keeps more than {limit_bytes:.0f} bytes")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
