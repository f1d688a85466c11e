"""Survive a closed output; follow the launcher when it is killed, or restarts the processes."""

import os
import signal
import sys
from collections.abc import Callable

import psutil
from accelerate.utils import gather_object

from .console import show, stop
from .signals import end_with_parent
from .topology import launcher_words


class LastingOutput:
    """A stream that survives a closed pipe or a full disk: output is dropped, the run goes on.

    Ctrl-C ends the `tee` of `script | tee log` at once; the script's next print would then end it before it saves.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text) or len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Callable, *args) -> int | None:
        try:
            return call(*args)
        except OSError as error:
            # /dev/null also swallows what is still buffered, and what libraries write to the file descriptor.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
            if self is sys.stdout:
                reason = error.strerror or error
                show(f"warning: the run goes on without output: {reason}", "yellow", sys.stderr)


def outlive_readers() -> None:
    """Turn stdout and stderr into `LastingOutput`s. A second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  stays open
        elif not isinstance(stream, LastingOutput):
            setattr(sys, name, LastingOutput(stream))


def follow_launcher() -> None:
    """Have the kernel send SIGTERM to this process when its launcher ends, even by `kill -9`.

    Otherwise it would keep running in the background with its folder locked. Without a launcher nothing changes: the
    parent is then a shell, which may exit before the run does. The watchdog ends a process that is stuck.
    """
    # These are set by `accelerate launch` and by torchrun.
    by_environment = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if sys.platform == "linux" and (by_environment or launcher_words() is not None):
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
