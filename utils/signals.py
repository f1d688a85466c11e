"""Signals: stop after the current step, on all processes together, and save first."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

import psutil
import torch
from accelerate import Accelerator

from .console import CLEAR_LINE, report_to_launcher, show, stop
from .topology import launcher_words, resume_command

# "Temporary failure, try again" (BSD's sysexits.h): the state is saved, and the same command with
# --resume continues.
EXIT_REQUEUE = 75

PR_SET_PDEATHSIG = 1  # prctl(2)


def follow_launcher() -> None:
    """From now on the end of the launcher ends this process, also a `kill -9`.

    The launcher would leave its processes running, unseen and with the lock of the folder. The
    kernel now sends them a SIGTERM. Not without a launcher: then the parent is a shell, which may
    well end before the run does.

    Raises: SystemExit if the launcher is gone already, killed while this process imported torch.
    """
    # Set by `accelerate launch` and by torchrun.
    by_environment = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    if sys.platform == "linux" and (by_environment or launcher_words() is not None):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if is_orphan():
            stop("the launcher was killed: start the run again", alone=True)


def end_with_parent(_worker: int) -> None:
    """For `worker_init_fn` of a DataLoader: a worker that is stuck in a read would stay for ever
    when the process that waits for it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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


class StopSignal:
    """SIGTERM, SIGUSR1, SIGHUP or Ctrl-C asks for a stop after the current step.

    A second Ctrl-C stops at once. `agreed()` gives the same answer on all processes, whichever of
    them got the signal.

    Args:
        check_every_s: seconds between two questions to the other processes.
    """

    def __init__(self, accelerator: Accelerator, check_every_s: float = 0.25):
        self.accelerator = accelerator
        self.check_every_s = check_every_s
        self.received = None
        self.pid = os.getpid()
        self.calls = 0
        self.next_check = 1
        self.checked_at = time.perf_counter()
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        # nohup has SIGHUP ignored. torchrun does not obey, and kills who does.
        has_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        if not has_nohup or "TORCHELASTIC_RUN_ID" in os.environ:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._receive)

    def _receive(self, number, _frame):
        if os.getpid() != self.pid:  # a forked data worker, which this process will end
            return
        second_ctrl_c = number == signal.SIGINT and self.received == signal.SIGINT
        self.received = number
        if number == signal.SIGINT and self.accelerator.is_main_process:
            message = "Ctrl-C: saving, then stopping; press Ctrl-C again to stop at once"
            if second_ctrl_c:
                message = "stopped at once; to continue from the last checkpoint: " + resume_command(
                    self.accelerator.project_dir
                )
            # os.write, because print may be in the middle of a line. The terminal may be gone: the
            # save matters more than the message.
            with contextlib.suppress(OSError):
                clear = CLEAR_LINE if os.isatty(2) else ""
                os.write(2, f"{clear}{message}\n".encode())
        if second_ctrl_c:
            os._exit(130)  # a checkpoint that is being written stays an unnamed temporary folder

    def agreed(self, must_stop: bool = False) -> bool:
        """Whether any process got a signal. Collective: call it on every rank, once a step.

        must_stop: this process has another reason to stop.

        To ask costs an all-reduce, so the processes ask only every `check_every_s`. They also agree
        on the number of calls until the next time.
        """
        stops = must_stop or self.received is not None
        if self.accelerator.num_processes == 1:
            return stops
        self.calls += 1
        if self.calls < self.next_check:
            return False
        now = time.perf_counter()
        calls_per_s = self.calls / max(now - self.checked_at, 1e-9)
        calls_to_next = max(1, int(calls_per_s * self.check_every_s))
        # One maximum answers both questions: was there a signal, and which rank's number of calls
        # is smallest.
        votes = [float(stops), -float(calls_to_next)]
        votes = torch.tensor(votes, device=self.accelerator.device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
        stopped, negative_calls = votes.tolist()
        self.calls = 0
        self.next_check = int(-negative_calls)
        self.checked_at = now
        return bool(stopped)

    def leave(self, step: int) -> None:
        """End all processes after a save. Collective: call it on every rank.

        Args:
            step: steps done, as saved.

        Raises:
            SystemExit: always, with EXIT_REQUEUE, which asks a scheduler to queue the job again.
        """
        self.accelerator.wait_for_everyone()
        command = resume_command(self.accelerator.project_dir)
        sentence = f"stopped by a signal; step {step} is saved; to continue: {command}"
        report_to_launcher(sentence)
        if self.accelerator.is_main_process:
            show(sentence, "yellow")
        self.accelerator.end_training()
        sys.exit(EXIT_REQUEUE)
