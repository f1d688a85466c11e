"""Reports which rank the others wait for, with its line of code, and says in one sentence that a peer is lost.

A thread of each process writes to the store of the process group which step its rank is in, how many collectives it has
begun, and where its main thread is. Where all stand still, the rank that has begun the fewest is behind. This holds for
NCCL too, whose calls return before the collective has ended.
"""

import argparse
import atexit
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from types import TracebackType

from accelerate.utils import gather_object
from torch import distributed

from ..console import own_line, show
from ..topology import resume_command, route_address

PATIENCE = 0.1  # of the time-out: a longer wait is reported
SHORTEST_S = 6.0  # but none that is shorter than this: a busy machine may stop a thread for a second or two
MAX_LATE = 5  # ranks in one sentence

# What gloo, NCCL and their store say when another process is gone or silent. Their other errors, such as those about
# wrong shapes, do not match.
LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process", re.IGNORECASE
)


def is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


class Watchdog(threading.Thread):
    """Watches the thread that makes it.

    Args:
        args: the parsed flags. If there is a --resume among them, the sentences end with the command to continue.

    Attributes:
        ranks: what each rank has last published; empty until `watch`, or with one process.
        found: the sentence about the rank that is behind; None while the run goes on.
    """

    step = 0  # optimizer steps done; `Run` sets it on the class

    def __init__(self, args: argparse.Namespace):
        super().__init__(name="watchdog", daemon=True)
        self.args, self.watched = args, threading.get_ident()
        self.ranks: list[dict] = []
        self.found: str | None = None
        self.beats, self.beat_at, self.progress, self.since = 0, 0.0, None, 0.0
        self.ended = threading.Event()

    def watch(self, timeout_s: float) -> None:
        """Tell all ranks who this one is, and begin to watch. With one process it does nothing. Collective.

        Args:
            timeout_s: after which a collective fails.
        """
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        self.timeout_s, self.patience_s = timeout_s, max(PATIENCE * timeout_s, SHORTEST_S)
        self.rank, self.group = distributed.get_rank(), distributed.group.WORLD
        self.store = distributed.distributed_c10d._get_default_store()  # there is no public name for it
        self.me = {"host": socket.gethostname(), "address": route_address()}
        self.ranks = gather_object([self.publish(time.monotonic())])
        # A thread in the middle of a call of the store would abort the interpreter's end.
        atexit.register(self.end)
        self.start()

    def end(self) -> None:
        self.ended.set()
        self.join(2)

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store ends with the process that has it
            while not self.ended.wait(self.patience_s / 20):
                self.look()

    def look(self) -> None:
        now = time.monotonic()
        still_s = self.publish(now)["still_s"]
        if still_s < self.patience_s / 2:
            self.found = None
            return
        for rank, before in enumerate(self.ranks):
            place = json.loads(self.store.get(f"watchdog/{rank}"))
            seen = now if place["beats"] != before["beats"] else before.get("seen", now)
            self.ranks[rank] = {**place, "seen": seen, "silent": now - seen > self.patience_s / 3}
        found = sentence_about(self.ranks, self.timeout_s) if still_s >= self.patience_s else None
        speaker = min(rank for rank, place in enumerate(self.ranks) if not place["silent"])
        if found and not self.found and speaker == self.rank:
            end = f"the run ends when a wait takes {self.timeout_s:.0f} s"
            show(f"warning: {found}; {end}{self.advice()}", "yellow", sys.stderr)
        self.found = found

    def publish(self, now: float) -> dict:
        """Tell the store where this rank is."""
        collectives = 0
        with contextlib.suppress(RuntimeError):  # a backend that does not count them
            collectives = self.group._get_sequence_number_for_group()
        was_stopped = now - self.beat_at > self.patience_s / 3
        if self.progress != [self.step, collectives] or was_stopped:
            self.progress, self.since = [self.step, collectives], now
        self.beats, self.beat_at = self.beats + 1, now
        at = own_line(traceback.walk_stack(sys._current_frames().get(self.watched)))
        still_s = now - self.since
        place = {**self.me, "at": at, "progress": self.progress, "still_s": still_s, "beats": self.beats}
        self.store.set(f"watchdog/{self.rank}", json.dumps(place))
        return place

    def advice(self) -> str:
        if not hasattr(self.args, "resume"):
            return ""
        return f"; to continue: {resume_command(getattr(self.args, 'output_dir', None))}"

    def sentence(self, error: BaseException, trace: TracebackType | None) -> str:
        """For an error of a collective: this rank, its line of code, and the ranks that it lost."""
        # Without gloo's "[source file:line] " in front and its advice behind.
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].partition(". This is typically")[0]
        lost = " or ".join(f"rank {rank} on {self.ranks[rank]['host']}" for rank in self.lost_ranks(reason))
        line = own_line(reversed([*traceback.walk_tb(trace)]))
        found = f"; {self.found}" if self.found and self.progress[0] == self.step else ""
        here = f"rank {os.environ['RANK']} on {socket.gethostname()}"
        return f"{here} lost {lost or 'another process'} at {line}: {reason}{found}{self.advice()}"

    def lost_ranks(self, reason: str) -> list[int]:
        """The ranks on the machine that `reason` names, or else those that are silent."""
        others = {rank: place for rank, place in enumerate(self.ranks) if place["host"] != self.me["host"]}
        named = [rank for rank, place in others.items() if place["address"] in re.findall(r"[\d.]+", reason)]
        silent = [rank for rank, place in others.items() if place.get("silent")]
        if not named and 0 in others and time.monotonic() - self.beat_at > self.patience_s / 3:
            return [0]  # the store, on the machine of rank 0, does not answer
        return named or silent


def sentence_about(ranks: list[dict], timeout_s: float) -> str | None:
    """Who waits for whom, in one sentence; None if nobody is behind.

    Args:
        ranks: what `Watchdog.publish` returned on each, with "silent": it no longer publishes.
    """

    def describe(rank: int) -> str:
        place = ranks[rank]
        step = f" in step {place['progress'][0]}" if place["progress"][0] else ""
        silent = ", whose process is stopped or gone" if place["silent"] else ""
        return f"rank {rank} on {place['host']} at {place['at']}{step}{silent}"

    furthest = max(place["progress"] for place in ranks)
    late = [rank for rank, place in enumerate(ranks) if place["silent"] or place["progress"] < furthest]
    waiting = [rank for rank in range(len(ranks)) if rank not in late]
    if late and waiting:
        waits = f"{describe(waiting[0])} has waited {ranks[waiting[0]]['still_s']:.0f} s for "
        return waits + ", and for ".join(map(describe, late[:MAX_LATE]))
    still_s = min(place["still_s"] for place in ranks)
    if still_s < timeout_s / 2:  # all may compute
        return None
    return f"no rank has gone on for {still_s:.0f} s: {', '.join(map(describe, range(len(ranks))[:MAX_LATE]))}"
