"""Hang watchdog: reports which rank the others wait for, with its line of code.

In each process, a thread writes to the process group's store which step its rank is in, how many collectives it has
started, and where its main thread is. If all ranks stand still, the one that has started the fewest is behind. This
works with NCCL too, whose calls return before the collective has finished.
"""

import argparse
import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback

import torch.distributed.nn.functional  # noqa: F401  imported later, its default arguments would keep the group alive
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from ..console import show, show_error
from ..launched import has_launcher, resume_command
from .errors import explain, own_line

PATIENCE = 0.1  # waits longer than this fraction of the timeout are reported,
SHORTEST_S = 6.0  # unless they are shorter than this: a busy machine may stop a thread for a second or two
MAX_LATE = 5  # ranks in one message


class Watchdog(threading.Thread):
    """Watches the thread that creates it.

    Args:
        args: the parsed flags. If they include --resume, messages end with the command to continue.

    Attributes:
        ranks: the last published state of each rank; empty before `watch`, and with one process.
        found: the message about the rank that is behind; None while the run progresses.
    """

    current: "Watchdog | None" = None  # the one of this process

    def __init__(self, args: argparse.Namespace):
        super().__init__(name="watchdog", daemon=True)
        self.args, self.watched = args, threading.get_ident()
        self.launcher = os.getppid() if has_launcher() else None
        self.ranks: list[dict] = []
        self.found: str | None = None
        self.beats, self.beat_at, self.progress, self.since = 0, 0.0, None, 0.0
        self.ended = threading.Event()

    def watch(self, accelerator: Accelerator, timeout_s: float) -> None:
        """Start watching; does nothing with one process. Collective."""
        if accelerator.num_processes == 1:
            return
        self.end()  # the watchdog of an earlier run
        self.accelerator, self.rank = accelerator, accelerator.process_index
        self.timeout_s, self.patience_s = timeout_s, max(PATIENCE * timeout_s, SHORTEST_S)
        self.store = distributed.distributed_c10d._get_default_store()  # no public API
        self.ranks = gather_object([self.publish(time.monotonic())])
        # A thread inside a call of the store would crash the interpreter's shutdown.
        atexit.register(self.end)
        group = distributed.group.WORLD  # not kept: see processes.end_process_group
        # From torch 2.15 on, the NCCL backend calls them before it aborts the process.
        if getattr(group, "supports_abort_hooks", False):
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
        has_store = True
        while not self.ended.wait(min(self.patience_s / 20, 1)):
            # The kernel has sent SIGTERM, but a main thread that waits for a GPU cannot handle it.
            if self.launcher not in (None, os.getppid()) and not self.ended.wait(self.timeout_s):
                os._exit(1)  # an unfinished checkpoint remains an unnamed temporary folder
            try:
                if has_store:
                    self.check_ranks()
            except Exception:  # the store disappears with the process that hosts it
                has_store = False

    def nccl_aborts(self) -> None:
        if not self.ended.is_set():
            error = distributed.DistBackendError("NCCL failed or timed out")
            show_error(explain(error, self.line(), self.about_lost))

    def check_ranks(self) -> None:
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
        progress = [self.accelerator.steps_done, collectives]
        if self.progress != progress or was_stopped:
            self.progress, self.since = progress, now
        self.beats, self.beat_at = self.beats + 1, now
        me = {"host": socket.gethostname(), "at": self.line(), "progress": self.progress}
        state = {**me, "still_s": now - self.since, "beats": self.beats}
        self.store.set(f"watchdog/{self.rank}", json.dumps(state))
        return state

    def line(self) -> str:
        """The line of code at which the watched thread is."""
        return own_line(traceback.walk_stack(sys._current_frames().get(self.watched)))

    def about_lost(self) -> str:
        """What else to say of a lost process. Ends the watchdog: the process is about to end."""
        self.ended.set()
        behind = f"; {self.found}" if self.found and self.progress[0] == self.accelerator.steps_done else ""
        return behind + self.advice()

    def advice(self) -> str:
        if not hasattr(self.args, "resume"):
            return ""
        return f"; to continue: {resume_command(getattr(self.args, 'output_dir', None))}"


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
