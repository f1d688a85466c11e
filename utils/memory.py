"""Peak memory, and a message for out-of-memory errors."""

import os
import re
import socket
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


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


def is_out_of_memory(error: BaseException) -> bool:
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")  # CUDA; cuBLAS and cuDNN; the CPU
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(word in text for word in words)


def advice(error: BaseException, line: str) -> str:
    request = re.search(r"[Tt]ried to allocate (\S+ \w+)", str(error))
    requested = f", which requested {request[1]}" if request else ""
    return (
        f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()} ran out of memory at {line}{requested}: "
        "use a smaller model, or more accumulation steps: the same steps from smaller micro-batches"
    )
