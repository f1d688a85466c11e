"""What to say instead of a traceback, if a library fails for a reason that a user can do something about."""

import os
import re
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from ..console import is_local_main, show, show_error

STANDARD_LIBRARY = sysconfig.get_path("stdlib")
WRAPPERS = tuple(str(Path(__file__).parents[1] / name) for name in ("accelerator.py", "launch.py", "parallel/fsdp.py"))

# A regular expression that is found in an error, as `explain` describes it, and what to say. The first that is found
# counts.
LIBRARY_ERRORS = {
    # Python, NumPy, pyarrow; CUDA; cuBLAS, cuDNN; the CPU.
    r"(?ms)^(\w*MemoryError|(Runtime|Accelerator|DistBackend)Error: .*(out of memory|ALLOC_FAILED|can't allocate))": (
        "{rank} ran out of memory at {line}{requested}: use a smaller model, or more accumulation steps: the same "
        "steps from smaller micro-batches"
    ),
    # A process is gone or does not answer. Other errors of torch.distributed, such as wrong shapes, do not match.
    # gloo raises plain RuntimeErrors, which begin with the line of its source: [.../gloo/transport/tcp/pair.cc:545]
    r"(?ims)^(?=Dist\w*Error:|RuntimeError: .*(/gloo/\S+\]|NCCL)).*"
    "(connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process"
    "|unhandled system error|communicator was aborted)": "{rank} lost another process at {line}: {reason}{about_lost}",
    # If the dataset raises an error in a worker, its text begins differently.
    r"(?m)^RuntimeError: DataLoader worker \(pid": "{reason}: if memory ran out, use fewer --num_workers",
    r"rebuild_storage_fd.*\n(Connection\w*|BrokenPipe|FileNotFound|EOF)Error:": (
        "a data worker ended while it sent a batch: if memory ran out, use fewer --num_workers"
    ),
    # Workers hand their batches over there.
    r"(?m)^RuntimeError: .*allocate shared memory": (
        "/dev/shm is full: enlarge it (docker run --shm-size 8g), or use fewer --num_workers"
    ),
    "got mixed torch.Tensor and DTensor": (
        "a sharded weight meets a whole tensor at {line}: FSDP gathers a weight only while its module is called, so "
        "call the module, or raise fsdp_min_num_params of the config file above the module's parameters. For averages, "
        "use shard and update_average of utils/parallel/fsdp.py, or copy the weights after prepare"
    ),
    "out of bounds for storage of size 0": (
        "the gathered copy of a sharded weight was used at {line} after FSDP had freed it, as by a second derivative "
        "(a gradient penalty): compute the inner gradient in the forward pass of the whole model, with "
        "fsdp_min_num_params of the config file above the model's parameters, or use DDP"
    ),
    "in-place operations that require placement changes are not supported|Cannot find device mesh from args": (
        "an operation at {line} needs whole tensors, and FSDP has shards of rows; of the optimizers, those work that "
        "compute each number by itself, such as AdamW and SGD: use one of them, or DDP"
    ),
    "FSDP does not support deepcopy": "a sharded model is copied at {line}: copy it before prepare, and prepare both",
    "chunk_cat.*Sparse|and sparse": "FSDP and --virtual_processes need dense gradients: sparse=False, or DDP alone",
}


def explain(error: BaseException, line: str | None = None, about_lost: Callable[[], str] = str) -> str | None:
    """The sentence for an error, described by the functions that were called and by the end of its traceback.

        main read ... recv_bytes
        EOFError: text

    Args:
        line: the line of code; by default the one in the traceback.
        about_lost: returns what else is known about a lost process.

    Returns:
        The sentence in LIBRARY_ERRORS, with what is in braces filled in; None if there is none.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    described = f"{' '.join(frame.f_code.co_name for frame, _ in frames)}\n{type(error).__name__}: {error}"
    sentence = next((text for sign, text in LIBRARY_ERRORS.items() if re.search(sign, described)), None)
    if sentence is None:
        return None
    # Without gloo's "[source file:line] " before the reason and its advice after it.
    reason = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". This is typically")[0]
    size = re.search(r"[Tt]ried to allocate (\S+ \w+)", described)
    return sentence.format(
        rank=f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}",
        line=line or own_line(reversed(frames)),
        reason=reason.rstrip(". "),
        requested=f", which requested {size[1]}" if size else "",
        about_lost=about_lost() if "{about_lost}" in sentence else "",
    )


def own_line(frames: Iterable[tuple]) -> str:
    """FILE:LINE of the innermost of `frames` (see traceback.walk_stack) that is neither in a library nor calls one."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if "-packages" not in file and not file.startswith((STANDARD_LIBRARY, *WRAPPERS, "<")):
            return f"{os.path.relpath(file)}:{line}"
    return "an unknown line"


def explain_errors(about_lost: Callable[[], str] = str) -> None:
    """From now on, print one line instead of a traceback for LIBRARY_ERRORS; all others keep their traceback.

    Every process with the error prints it, since theirs may differ, and reports it to the launcher.
    """

    def hook(kind, error, trace) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if is_local_main():
                show("stopped by Ctrl-C: nothing was saved", "yellow", sys.stderr)
        elif sentence := explain(error, about_lost=about_lost):
            show_error(sentence)
        else:
            hook.other_hook(kind, error, trace)

    # A second run in the same process replaces the hook of the first.
    hook.other_hook = getattr(sys.excepthook, "other_hook", sys.excepthook)
    sys.excepthook = hook
