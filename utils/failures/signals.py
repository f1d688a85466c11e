"""On a signal, stop all processes after the current step, and save first."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

import torch
from accelerate import Accelerator

from ..console import CLEAR_LINE, report_to_launcher, show
from ..launched import resume_command

# "Temporary failure, try again" (BSD's sysexits.h): the same command with --resume continues.
EXIT_REQUEUE = 75
PR_SET_PDEATHSIG = 1  # prctl(2)
CHECK_EVERY_S = 0.25  # how often a process asks the others


def end_with_parent(number: int) -> None:
    """Have Linux send this process a signal when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def obey_only_parent(_worker: int = 0) -> None:
    """For `worker_init_fn` of a DataLoader: the worker ends with its parent, or when the parent sends SIGTERM.

    Slurm and Kubernetes send SIGTERM to every process of a job, but the parent needs the worker's data to finish the
    step that it then saves. Programs that the dataset starts inherit the blocked SIGTERM.
    """
    if sys.platform != "linux":
        return
    end_with_parent(signal.SIGKILL)  # the worker may be stuck in a read
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def end_when_told() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=end_when_told, daemon=True).start()


class StopSignal:
    """SIGTERM, SIGUSR1, SIGHUP or Ctrl-C stops the run after the current step; a second Ctrl-C stops it at once."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        earlier = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)  # of the run before this one
        self.received, self.had_ctrl_c = getattr(earlier, "received", None), False
        self.pid = os.getpid()
        self.calls, self.next_check, self.checked_at = 0, 1, time.perf_counter()
        numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        # Respect nohup's ignored SIGHUP, except under torchrun, which kills its workers anyway.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._receive)

    def _receive(self, number, _frame):
        if os.getpid() != self.pid:  # a forked data worker, which its parent will end
            return
        # torchrun forwards a second Ctrl-C as SIGTERM.
        again = (signal.SIGINT, signal.SIGTERM) if "TORCHELASTIC_RUN_ID" in os.environ else (signal.SIGINT,)
        second_ctrl_c = self.had_ctrl_c and number in again
        self.had_ctrl_c = self.had_ctrl_c or number == signal.SIGINT
        self.received = number
        if (number == signal.SIGINT or second_ctrl_c) and self.accelerator.is_main_process:
            message = "Ctrl-C: saving, then stopping; press Ctrl-C again to stop at once"
            if second_ctrl_c:
                command = resume_command(self.accelerator.project_dir)
                message = f"stopped at once; to continue from the last checkpoint: {command}"
            # os.write, because a print may be under way. If the terminal is gone, saving matters more than the message.
            with contextlib.suppress(OSError):
                os.write(2, f"{CLEAR_LINE if os.isatty(2) else ''}{message}\n".encode())
        if second_ctrl_c:
            os._exit(130)  # an unfinished checkpoint remains an unnamed temporary folder

    def agreed(self, must_stop: bool = False) -> bool:
        """Whether any process got a signal or must stop; the same answer on all. Call it once per step. Collective.

        Asking costs an all-reduce, so the processes ask only every CHECK_EVERY_S, and agree on the number of calls
        until they ask again.
        """
        stops = must_stop or self.received is not None
        if self.accelerator.num_processes == 1:
            return stops
        self.calls += 1
        if self.calls < self.next_check:
            return False
        now = time.perf_counter()
        calls_per_s = self.calls / max(now - self.checked_at, 1e-9)
        calls_to_next = max(1, int(calls_per_s * CHECK_EVERY_S))
        # One maximum serves both: whether there was a signal, and the smallest number of calls of any rank.
        votes = torch.tensor([float(stops), -float(calls_to_next)], device=self.accelerator.device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
        stopped, negative_calls = votes.tolist()
        self.calls, self.next_check, self.checked_at = 0, int(-negative_calls), now
        return bool(stopped)

    def leave(self, step: int) -> None:
        """After saving `step`, exit with EXIT_REQUEUE, which asks a scheduler to queue the job again. Collective."""
        self.accelerator.wait_for_everyone()
        command = resume_command(self.accelerator.project_dir)
        sentence = f"stopped by a signal; step {step} is saved; to continue: {command}"
        report_to_launcher(sentence)
        if self.accelerator.is_main_process:
            show(sentence, "yellow")
        self.accelerator.end_training()
        sys.exit(EXIT_REQUEUE)
