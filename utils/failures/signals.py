"""On a signal, stop all processes after the current step, and save first."""

import contextlib
import os
import signal
import sys
import time

import torch
from accelerate import Accelerator

from ..console import report_to_launcher, show

# "Temporary failure, try again" (BSD's sysexits.h): the same command with --resume continues.
EXIT_REQUEUE = 75
CHECK_EVERY_S = 0.25  # how often a process asks the others


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
        if self.had_ctrl_c and number in again:
            os._exit(130)  # an unfinished checkpoint remains an unnamed temporary folder
        self.had_ctrl_c = self.had_ctrl_c or number == signal.SIGINT
        self.received = number
        if number == signal.SIGINT and self.accelerator.is_main_process:
            # os.write, because a print may be under way. If the terminal is gone, saving matters more than the message.
            with contextlib.suppress(OSError):
                os.write(2, b"\nCtrl-C: saving, then stopping; press Ctrl-C again to stop at once\n")

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
        continued = f"the same command with --resume --output_dir {self.accelerator.project_dir}"
        sentence = f"stopped by a signal; step {step} is saved; to continue: {continued}"
        report_to_launcher(sentence)
        if self.accelerator.is_main_process:
            show(sentence)
        self.accelerator.end_training()
        sys.exit(EXIT_REQUEUE)
