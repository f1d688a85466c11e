"""What happens to a process from outside: its output is closed, its launcher is killed or restarts it."""

import os
import select
import signal
import sys
import threading
import time

from accelerate.utils import gather_object

from .console import show, stop
from .signals import end_with_parent
from .topology import launcher_words


class LastingOutput:
    """A stream that survives a closed pipe or a full disk: output is dropped, the run goes on.

    Without it `script | tee log` would die at its next line after a Ctrl-C, which ends `tee` at once, and before the
    checkpoint is saved.
    """

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        # /dev/null also takes what is still in the buffer, and what libraries write to the file descriptor.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)
        if self is sys.stdout:
            reason = error.strerror or error
            show(f"warning: the run goes on, but not its output: {reason}", "yellow", sys.stderr)


def outlive_readers() -> None:
    """From now on, stdout and stderr are `LastingOutput`s. A second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the end
        elif not isinstance(stream, LastingOutput):
            setattr(sys, name, LastingOutput(stream))


def follow_launcher(timeout_s: float) -> None:
    """From now on, the end of the launcher ends this process, even after `kill -9`.

    Otherwise the processes would run on unseen and keep the folder locked. The kernel sends them SIGTERM instead.
    Without a launcher nothing changes: the parent is then a shell, which may end before the run does.

    Args:
        timeout_s: time for the last step and the save.
    """
    # Set by `accelerate launch` and by torchrun.
    by_environment = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if sys.platform == "linux" and (by_environment or launcher_words() is not None):
        end_with_parent(number=signal.SIGTERM)
        threading.Thread(target=end_after_launcher, args=(os.getppid(), timeout_s), daemon=True).start()


def end_after_launcher(launcher: int, timeout_s: float) -> None:
    """End this process `timeout_s` seconds after the process `launcher`, even if it is stuck."""
    try:
        select.select([os.pidfd_open(launcher)], [], [])
    except ProcessLookupError:  # it has just ended
        pass
    except OSError:  # an old Linux
        return
    time.sleep(timeout_s)
    os._exit(1)  # a checkpoint that is being written stays an unnamed temporary folder


def check_restarts(is_new_folder: bool) -> None:
    """With the launcher's --max_restarts, check that restarted processes find each other and the checkpoints.

    Args:
        is_new_folder: the run has no --output_dir, and writes to a new folder.

    Raises:
        SystemExit: if they would not.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
        stop(
            "--max_restarts needs --rdzv_backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise restarted "
            "processes find the addresses of the old ones in the launcher's store"
        )
    if is_new_folder:
        stop("--max_restarts needs an --output_dir, to continue from the checkpoints in it")


def was_restarted() -> bool:
    """Whether the launcher restarted any process after a failure. Collective.

    On a machine where no process failed, the launcher's count stays 0.
    """
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return False
    return any(gather_object([int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))]))
