"""Peak memory of a run."""

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
