"""The launcher's end: its processes end with it, and are told where it would not wait for a save."""

import math
import os
import select
import signal
import sys
import threading
import time

import psutil

from ..console import show, stop
from ..signals import end_with_parent
from ..topology import launcher_words


def follow_launcher(timeout_s: float) -> None:
    """From now on the end of the launcher ends this process, also a `kill -9`.

    The launcher would leave its processes running, unseen and with the lock of the folder. The kernel now sends them a
    SIGTERM. Not without a launcher: then the parent is a shell, which may well end before the run does.

    Args:
        timeout_s: how long this process then has for its last step and the save.

    Raises:
        SystemExit: if the launcher is gone already, killed while this process imported torch.
    """
    # Set by `accelerate launch` and by torchrun.
    by_environment = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if sys.platform == "linux" and (by_environment or launcher_words() is not None):
        end_with_parent(number=signal.SIGTERM)
        if is_orphan():
            stop("the launcher was killed: start the run again", alone=True)
        threading.Thread(target=end_after_launcher, args=(os.getppid(), timeout_s), daemon=True).start()


def end_after_launcher(launcher: int, timeout_s: float) -> None:
    """End this process `timeout_s` seconds after the process `launcher`, in whatever it is stuck by then."""
    try:
        select.select([os.pidfd_open(launcher)], [], [])
    except ProcessLookupError:  # it has just ended
        pass
    except OSError:  # an old Linux
        return
    time.sleep(timeout_s)
    os._exit(1)  # a checkpoint that is being written stays an unnamed temporary folder


def is_orphan() -> bool:
    """Whether init has adopted this process. In a container, process 1 may be the launcher."""
    parent = psutil.Process().parent()
    if parent is None:
        return False  # its parent is in another container
    try:
        is_init = parent.pid == 1 or parent.name() == "systemd"
        return is_init and "python" not in parent.exe()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:  # somebody else's process
        return is_init


def warn_if_killed_sooner(save_time_s: float) -> bool:
    """Whether torchrun kills its processes sooner than `save_time_s` after a signal; if so, say it."""
    patience_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or save_time_s < patience_s:
        return False
    show(
        f"warning: a save may take {save_time_s:.0f} s, and {patience_s:.0f} s after a Ctrl-C or SIGTERM the launcher "
        "kills its processes, saved or not: start it with "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * math.ceil(save_time_s)} in the environment",
        "yellow",
    )
    return True
