"""How much memory training takes, and the largest batch that fits into what there is."""

import contextlib
import functools
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size


def largest_that_fits(attempt: Callable, size: int, accelerator: Accelerator, cpu_memory_gib: float = 0) -> int:
    """Halve `size`, rounding up, until `attempt(size)` fits into the memory of each process; 0 if not even 1 does.

    A collective, but `attempt` must not communicate (so: the bare model, before `prepare`): of two processes that
    all-reduce, one that runs out of memory leaves the other waiting for ever. They agree when all of them are done, on
    the smallest answer. `cpu_memory_gib`: on a CPU, the limit for what autograd keeps; 0: a share of what is free.

    accelerate.utils.find_executable_batch_size does another thing: it runs the whole training again, with 0.9 of the
    batch, in the one process that ran out of memory. The others wait in their all-reduce; and if all of them ran out
    alike, the update is now that of a smaller batch. Its test for an out-of-memory error is the one used here.
    """
    limit = contextlib.nullcontext
    if accelerator.device.type == "cpu":
        free = psutil.virtual_memory().available / accelerator.num_processes
        limit = functools.partial(limit_of_kept_tensors, int(cpu_memory_gib * 2**30 or free))

    def fits() -> bool:  # when it returns, nothing holds what `attempt` left in memory any more, nor its traceback
        try:
            with limit():
                attempt(size)
        except Exception as error:
            if isinstance(error, MemoryError) or should_reduce_batch_size(error) or "ALLOC_FAILED" in str(error):
                return False
            raise
        return True

    while size and not fits():
        clear_device_cache(garbage_collection=True)
        size = -(-size // 2) if size > 1 else 0
    clear_device_cache(garbage_collection=True)
    return min(gather_object([size]))


@contextlib.contextmanager
def limit_of_kept_tensors(limit_bytes: int):
    """Raise MemoryError as soon as autograd keeps more than `limit_bytes` for backward passes begun in here.

    On a CPU memory does not run out with an error: Linux promises more than it has, and kills the process that takes
    it. A limit of the process (RLIMIT_DATA) gives errors; but oneDNN, refused memory for code once, fails ever after.
    """
    kept = {}  # by address: a tensor that several operations keep, or a weight, counts once

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        if sum(kept.values()) > limit_bytes:
            raise MemoryError(f"autograd keeps more than {limit_bytes} bytes")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark of this process, see man 5 proc


def own_peak_memory_gib(device: torch.device) -> float:
    """What this process took at most, since the last reset.

    On a GPU: of its tensors; on a CPU: of the whole process, and elsewhere than under Linux since its start. (There
    getrusage would not do: it begins with what the launcher took before it became this process.)
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # in bytes on macOS


def peak_memory_gib(accelerator: Accelerator) -> float:
    """`own_peak_memory_gib` of the process that took most. A collective."""
    return max(gather_object([own_peak_memory_gib(accelerator.device)]))
