"""Follow the launcher when it is killed, or when it restarts the processes; end the process group."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch.distributed.nn.functional  # noqa: F401  imported later, its default arguments would keep the group alive
from accelerate.utils import gather_object
from torch import distributed

from ..console import stop
from ..launched import has_launcher


def end_with_parent(number: int) -> None:
    """Have Linux send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG of prctl(2)


def follow_launcher() -> None:
    """Have the kernel send SIGTERM to this process when its launcher ends, even by `kill -9`.

    Otherwise it would keep running in the background with its folder locked. Without a launcher nothing changes: the
    parent is then a shell, which may exit before the run does. The watchdog ends a process that is stuck.
    """
    if sys.platform == "linux" and has_launcher():
        end_with_parent(signal.SIGTERM)
        if is_orphan():
            stop("the launcher was killed: start the run again", alone=True)


def is_orphan() -> bool:
    """Whether init has adopted this process. In a container, process 1 may be the launcher."""
    parent = psutil.Process().parent()
    if parent is None:
        return False  # its parent is in another container
    try:
        return (parent.pid == 1 or parent.name() == "systemd") and "python" not in parent.cmdline()[0]
    except psutil.NoSuchProcess:
        return True


def check_restarts(is_new_folder: bool) -> None:
    """With the launcher's --max_restarts, stop if restarted processes could not find each other or the checkpoints."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
        stop(
            "--max_restarts needs --rdzv_backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise restarted "
            "processes would read the addresses of the old ones from the launcher's store"
        )
    if is_new_folder:
        stop("--max_restarts needs an --output_dir, whose checkpoints the restarted run continues from")


def was_restarted() -> bool:
    """Whether the launcher restarted any process after a failure. Collective."""
    can_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # On a machine where no process failed, the count stays 0.
    return can_restart and any(gather_object([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))]))


def end_process_group() -> None:
    """End the process group, and wait for gloo's threads, which end with the last reference to it.

    FSDP's modules keep one. A thread of gloo that frees tensors after the interpreter has shut down aborts the process
    (before Python 3.14).
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
        rests, end = 0, time.monotonic() + 10
        while rests < 2 and time.monotonic() < end:
            time.sleep(0.005)  # releases the GIL, which those threads need
            rests = 0 if is_gloo_running() else rests + 1


def is_gloo_running() -> bool:
    """Whether a thread of gloo runs, or waits for a processor; on Linux."""
    with contextlib.suppress(OSError):  # a thread has ended
        return any("(pt_gloo_runloop) R" in file.read_text() for file in Path("/proc/self/task").glob("*/stat"))
    return True
