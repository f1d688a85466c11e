"""Hang watchdog: reports which rank the others wait for, or which one is lost, with its line of code.

In each process, a thread writes to the process group's store which step its rank is in, how many collectives it has
started, and where its main thread is. If all ranks stand still, the one that has started the fewest is behind. This
works with NCCL too, whose calls return before the collective has finished.

With NCCL the main thread then waits for the GPU, where it can neither raise an error nor handle a signal. The thread
ends the process instead, and torch's NCCL backend says when it gives up.
"""

import argparse
import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback

import psutil
import torch.distributed.nn.functional  # noqa: F401  before a process group exists: its defaults would keep the group
from accelerate.utils import gather_object
from torch import distributed

from .console import own_line, show, show_error
from .topology import resume_command, route_address

PATIENCE = 0.1  # waits longer than this fraction of the timeout are reported,
SHORTEST_S = 6.0  # unless they are shorter than this: a busy machine may stop a thread for a second or two
MAX_LATE = 5  # ranks in one message
REACTION_S = 2.0  # time for the main thread to end the process after a signal

# Errors of gloo, NCCL and their store that mean a process is gone or does not answer; others, such as wrong shapes, do
# not match.
LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process"
    "|unhandled system error|communicator was aborted",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


class Watchdog(threading.Thread):
    """Watches the thread that creates it.

    Args:
        args: the parsed flags. If they include --resume, messages end with the command to continue.

    Attributes:
        ranks: the last published state of each rank; empty before `watch`, and with one process.
        found: the message about the rank that is behind; None while the run progresses.
    """

    step = 0  # optimizer steps done; `Run` sets it on the class
    current: "Watchdog | None" = None  # the one of this process

    def __init__(self, args: argparse.Namespace):
        super().__init__(name="watchdog", daemon=True)
        self.args, self.watched = args, threading.get_ident()
        self.ranks: list[dict] = []
        self.found: str | None = None
        self.beats, self.beat_at, self.progress, self.since = 0, 0.0, None, 0.0
        self.ended = threading.Event()
        self.received, self.received_at = [], 0.0  # signals that end the run

    def watch(self, timeout_s: float) -> None:
        """Exchange host names and start watching; does nothing with one process. Collective."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        self.end()  # that of an earlier run
        self.timeout_s, self.patience_s = timeout_s, max(PATIENCE * timeout_s, SHORTEST_S)
        self.rank = distributed.get_rank()
        self.store = distributed.distributed_c10d._get_default_store()  # no public API
        host, launcher = socket.gethostname(), os.getppid()
        self.me = {"host": host, "address": route_address(), "launcher": launcher, "pid": os.getpid()}
        self.ranks = gather_object([self.publish(time.monotonic())])
        # A thread inside a call of the store would crash the interpreter's shutdown.
        atexit.register(self.end)
        self.signals, writer = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the signals of a child are its own
        group = distributed.group.WORLD  # not kept: see end_process_group
        if group.supports_abort_hooks:  # torch's NCCL backend calls them before it aborts the process
            group.register_abort_hook(id(self), self.nccl_aborts)
        Watchdog.current = self
        self.start()

    @classmethod
    def end(cls) -> None:
        """End the watchdog of this process, if there is one."""
        if cls.current is not None and cls.current.is_alive():
            cls.current.ended.set()
            cls.current.join(10)  # in vain if the link to the store is cut

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store disappears with the process that hosts it
            while self.wait():
                self.look()
        while self.wait():
            pass

    def wait(self) -> bool:
        """Wait for the next look; end the process where a signal asks for it but the main thread cannot."""
        ended = self.ended.wait(min(self.patience_s / 20, 1))
        with contextlib.suppress(BlockingIOError):
            for number in {signal.SIGINT, signal.SIGTERM}.intersection(os.read(self.signals, 64)):
                self.received, self.received_at = [*self.received, number], time.monotonic()
        waited_s = time.monotonic() - self.received_at
        if ended or not self.received or waited_s < REACTION_S or not threading.main_thread().is_alive():
            return not ended
        if signal.SIGINT in self.received[:-1]:
            if self.rank == 0:
                show(f"stopped at once{self.advice()}", "yellow", sys.stderr)
            os._exit(130)
        if os.getppid() != self.me["launcher"] and waited_s > self.timeout_s:
            os._exit(1)  # an unfinished checkpoint remains an unnamed temporary folder
        # When a process has failed, its launcher ends the others: they can neither go on nor save.
        if signal.SIGTERM in self.received and self.ended_ranks():
            show_error(self.message("its process has ended"))
            os._exit(1)
        return True

    def nccl_aborts(self) -> None:
        if not self.ended.is_set():
            show_error(self.message("NCCL failed or timed out"))

    def look(self) -> None:
        now = time.monotonic()
        still_s = self.publish(now)["still_s"]
        if still_s < self.patience_s / 2:
            self.found = None
            return
        for rank, before in enumerate(self.ranks):
            state = json.loads(self.store.get(f"watchdog/{rank}"))
            seen = now if state["beats"] != before["beats"] else before.get("seen", now)
            self.ranks[rank] = {**state, "seen": seen, "silent": now - seen > self.patience_s / 3}
        message = sentence_about(self.ranks, self.timeout_s) if still_s >= self.patience_s else None
        speaker = min(rank for rank, state in enumerate(self.ranks) if not state["silent"])
        if message and not self.found and speaker == self.rank:
            end = f"the run ends when a wait takes {self.timeout_s:.0f} s"
            show(f"warning: {message}; {end}{self.advice()}", "yellow", sys.stderr)
        self.found = message

    def publish(self, now: float) -> dict:
        """Write the state of this rank to the store."""
        collectives = 0
        with contextlib.suppress(RuntimeError):  # backends that do not count them
            collectives = distributed.group.WORLD._get_sequence_number_for_group()
        was_stopped = now - self.beat_at > self.patience_s / 3
        if self.progress != [self.step, collectives] or was_stopped:
            self.progress, self.since = [self.step, collectives], now
        self.beats, self.beat_at = self.beats + 1, now
        at = own_line(traceback.walk_stack(sys._current_frames().get(self.watched)))
        still_s = now - self.since
        state = {**self.me, "at": at, "progress": self.progress, "still_s": still_s, "beats": self.beats}
        self.store.set(f"watchdog/{self.rank}", json.dumps(state))
        return state

    def advice(self) -> str:
        if not hasattr(self.args, "resume"):
            return ""
        return f"; to continue: {resume_command(getattr(self.args, 'output_dir', None))}"

    def sentence(self, error: BaseException, line: str) -> str:
        """The message for a failed collective."""
        self.ended.set()  # the main thread ends the process
        # Without gloo's "[source file:line] " before it and its advice after it.
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].partition(". This is typically")[0]
        return self.message(reason, line)

    def message(self, reason: str, line: str | None = None) -> str:
        """This rank, its line of code, and the ranks that it lost."""
        lost = " or ".join(f"rank {rank} on {self.ranks[rank]['host']}" for rank in self.lost_ranks(reason))
        line = line or own_line(traceback.walk_stack(sys._current_frames().get(self.watched)))
        behind = f"; {self.found}" if self.found and self.progress[0] == self.step else ""
        this_rank = f"rank {os.environ['RANK']} on {socket.gethostname()}"
        return f"{this_rank} lost {lost or 'another process'} at {line}: {reason}{behind}{self.advice()}"

    def lost_ranks(self, reason: str) -> list[int]:
        """The ranks on the machine in `reason`; or else those that have ended; or those silent on other machines."""
        others = {rank: state for rank, state in enumerate(self.ranks) if state["host"] != self.me["host"]}
        named = [rank for rank, state in others.items() if state["address"] in re.findall(r"[\d.]+", reason)]
        silent = [rank for rank, state in others.items() if state.get("silent")]
        if not named and 0 in others and time.monotonic() - self.beat_at > self.patience_s / 3:
            return [0]  # the store, on rank 0's machine, does not answer
        return named or self.ended_ranks() or silent

    def ended_ranks(self) -> list[int]:
        """The ranks of this launcher whose process has ended."""
        keys = ("host", "launcher")
        here = [rank for rank, state in enumerate(self.ranks) if all(state[key] == self.me[key] for key in keys)]
        return [rank for rank in here if not psutil.pid_exists(self.ranks[rank]["pid"])]


def end_process_group() -> None:
    """End the process group, after the watchdog, which reads its store.

    gloo's threads end with the last reference to the group. One that still had to free the tensors of the last
    collective while the interpreter ends would abort the process (before Python 3.14).
    """
    Watchdog.end()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def sentence_about(ranks: list[dict], timeout_s: float) -> str | None:
    """Which rank waits for which; None if none is behind.

    Args:
        ranks: the states from `Watchdog.publish`, with "silent": the rank no longer publishes.
    """

    def describe(rank: int) -> str:
        state = ranks[rank]
        step = f" in step {state['progress'][0]}" if state["progress"][0] else ""
        silent = ", whose process is stopped or gone" if state["silent"] else ""
        return f"rank {rank} on {state['host']} at {state['at']}{step}{silent}"

    furthest = max(state["progress"] for state in ranks)
    late = [rank for rank, state in enumerate(ranks) if state["silent"] or state["progress"] < furthest]
    waiting = [rank for rank in range(len(ranks)) if rank not in late]
    if late and waiting:
        waits = f"{describe(waiting[0])} has waited {ranks[waiting[0]]['still_s']:.0f} s for "
        return waits + ", and for ".join(map(describe, late[:MAX_LATE]))
    still_s = min(state["still_s"] for state in ranks)
    if still_s < timeout_s / 2:  # all may be computing
        return None
    return f"no rank has progressed for {still_s:.0f} s: {', '.join(map(describe, range(len(ranks))[:MAX_LATE]))}"
