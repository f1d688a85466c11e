"""What to say beside a traceback, if a library fails for a reason that a user can do something about."""

import os
import re
import socket
import sys
import sysconfig
import traceback
from pathlib import Path

from ..console import show_error

STANDARD_LIBRARY = sysconfig.get_path("stdlib")
WRAPPERS = tuple(str(Path(__file__).parents[1] / name) for name in ("accelerator.py", "launch.py", "parallel/fsdp.py"))

# A regular expression that is found in "Class: text" of an error, and what to say. The first that is found counts.
LIBRARY_ERRORS = {
    # Python, NumPy, pyarrow; CUDA; cuBLAS, cuDNN; the CPU.
    r"(?ms)^(\w*MemoryError|(Runtime|Accelerator|DistBackend)Error: .*(out of memory|ALLOC_FAILED|can't allocate))": (
        "{rank} ran out of memory at {line}: use a smaller model, or more accumulation steps: the same "
        "steps from smaller micro-batches"
    ),
    # A process is gone or does not answer. Other errors of torch.distributed, such as wrong shapes, do not match.
    # gloo raises plain RuntimeErrors, which begin with the line of its source: [.../gloo/transport/tcp/pair.cc:545]
    r"(?ims)^(?=Dist\w*Error:|RuntimeError: .*(/gloo/\S+\]|NCCL)).*"
    "(connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process"
    "|unhandled system error|communicator was aborted)": "{rank} lost another process at {line}: {reason}",
    "chunk_cat.*Sparse|and sparse": "FSDP and --virtual_processes need dense gradients: sparse=False, or DDP alone",
}


def explain(error: BaseException) -> str | None:
    """The sentence in LIBRARY_ERRORS, with what is in braces filled in; None if there is none."""
    described = f"{type(error).__name__}: {error}"
    sentence = next((text for sign, text in LIBRARY_ERRORS.items() if re.search(sign, described)), None)
    if sentence is None:
        return None
    # Without gloo's "[source file:line] " before the reason and its advice after it.
    reason = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". This is typically")[0]
    return sentence.format(
        rank=f"rank {os.environ.get('RANK', 0)} on {socket.gethostname()}",
        line=own_line(traceback.extract_tb(error.__traceback__)),
        reason=reason.rstrip(". "),
    )


def own_line(stack: traceback.StackSummary) -> str:
    """FILE:LINE of the innermost call of `stack` that is neither in a library nor calls one."""
    for call in reversed(stack):
        if "-packages" not in call.filename and not call.filename.startswith((STANDARD_LIBRARY, *WRAPPERS, "<")):
            return f"{os.path.relpath(call.filename)}:{call.lineno}"
    return "an unknown line"


def report(error: BaseException) -> bool:
    """Print the last lines of the traceback of one of LIBRARY_ERRORS, and its sentence; returns whether it is one.

    Every process with the error prints it, since theirs may differ, and reports it to the launcher.
    """
    sentence = explain(error)
    if sentence:
        sys.stderr.write("".join(traceback.format_exception(error, limit=-2)))
        show_error(sentence)
    return sentence is not None
