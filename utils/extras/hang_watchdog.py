"""A rank that the others wait for is named, with the line of code that it is at.

An endless loop, a breakpoint, a slow disk or a stopped process on one rank leaves the others
waiting in a collective, until it times out. Here a thread of each process looks now and then where
its main thread is, and writes that to the store of the process group. When a wait takes a tenth of
the time-out, one line says who waits where for whom.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from types import FrameType

from torch import distributed

from ..console import LAUNCH, show

PATIENCE = 0.1  # of the time-out: a longer wait is told
LOOKS = 20  # at the own main thread, in that time
SILENT_S = 2.0  # without a sign of the thread of another process, at least
LOOKERS = 4  # the first ranks look at all others: one of them will be alive
MAX_PLACES = 5  # in one sentence
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
BACKWARD = "_engine_run_backward"
# Of a process that has not looked yet.
UNKNOWN = {"at": None, "waits_in": None, "step": None, "host": "?", "since_s": 0.0, "look": 0}


def place_of(frame: FrameType | None) -> dict:
    """Where a thread is. at: the innermost line outside of libraries, "file:line"; waits_in: the
    collective that was called, or "backward", in which DDP has its own; None elsewhere."""
    at = waits_in = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(COLLECTIVES):
            waits_in = code.co_name
        elif code.co_name == BACKWARD and waits_in is None:
            waits_in = "backward"
        elif not code.co_filename.startswith((*LIBRARIES, LAUNCH, "<")):  # in LAUNCH is accelerator.backward
            at = f"{os.path.relpath(code.co_filename)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    return {"at": at, "waits_in": waits_in}


class HangWatchdog(threading.Thread):
    """Looks where the thread that makes it is, tells the store, and names ranks that are late.

    Args:
        timeout_s: after which a collective fails.

    Attributes:
        current: the one of this process; None with one process.
        step: optimizer steps done, for the sentences; None: not known.
        found: what it would say now; None while nothing is late.
    """

    current: "HangWatchdog | None" = None

    def __init__(self, timeout_s: float):
        super().__init__(name="hang_watchdog", daemon=True)
        # Private names of torch: it has no public ones for them.
        self.group = distributed.distributed_c10d._get_default_group()
        self.store = distributed.distributed_c10d._get_default_store()
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.patience_s = PATIENCE * timeout_s
        self.silent_s = max(0.3 * self.patience_s, SILENT_S)
        self.watched = threading.get_ident()
        self.ended = threading.Event()
        self.step: int | None = None
        self.place, self.looks = None, 0
        self.since = self.looked = time.monotonic()
        self.signs = {}  # of other ranks: the last number of a look, and when it was new
        self.found = None
        self.told = False
        self.last_found = (None, 0.0)  # what it said last, and when: an error of the wait comes after the wait

    def run(self) -> None:
        with contextlib.suppress(Exception):  # the store ended with the process that has it
            while not self.ended.wait(self.patience_s / LOOKS):
                self.look()

    def end(self) -> None:
        self.ended.set()
        self.join(2)

    def look(self) -> None:
        place = place_of(sys._current_frames().get(self.watched))
        place["step"] = self.step
        place["collectives"] = self.group._get_sequence_number_for_group()  # begun so far
        now = time.monotonic()
        # Not the line: one of a loop without an end is another one at each look.
        moved = {**place, "at": None}
        was_stopped = now - self.looked > self.silent_s
        self.looked = now
        if moved != self.place or was_stopped:
            self.place, self.since, self.found, self.told = moved, now, None, False
            self.signs = {}
        self.looks += 1
        stays_s = now - self.since
        sign = {**place, "host": socket.gethostname(), "since_s": stays_s, "look": self.looks}
        self.store.set(f"stalls/{self.rank}", json.dumps(sign))
        if self.rank >= LOOKERS or stays_s < max(self.patience_s - self.silent_s, 0):
            return
        places = self.read(now)
        if stays_s < max(self.patience_s, self.silent_s):
            return
        self.found = sentence_about(places, self.patience_s)
        speakers = [rank for rank, place in enumerate(places) if place["answers"]]
        if self.found is None or speakers[0] != self.rank:
            return
        self.last_found = (self.found, now)
        self.store.set("stalls/found", self.found)
        if not self.told:
            self.told = True
            show(f"warning: {self.found}", "yellow", sys.stderr)

    def read(self, now: float) -> list[dict]:
        """The places of all ranks, with "answers": whether its thread has looked lately."""
        places = []
        for rank in range(self.world_size):
            key = f"stalls/{rank}"
            place = dict(UNKNOWN)
            if self.store.check([key]):
                place = json.loads(self.store.get(key))
            look, seen = self.signs.get(rank, (None, now))
            if look != place["look"]:
                seen = now
            self.signs[rank] = (place["look"], seen)
            places.append({**place, "answers": now - seen < self.silent_s})
        return places


def where(place: dict) -> str:
    words = f"at {place['at'] or 'an unknown line'}"
    return words if place["step"] is None else f"{words} in step {place['step']}"


def waiting(ranks: list[int], place: dict) -> str:
    names = f"rank {ranks[0]} on {place['host']} waits"
    if len(ranks) > 1:
        names = f"ranks {', '.join(map(str, ranks))} wait"
    return f"{names} in {place['waits_in']} {where(place)} since {place['since_s']:.0f} s"


def sentence_about(places: list[dict], patience_s: float) -> str | None:
    """What keeps the ranks from going on, in one sentence; None if nothing does.

    places: of each rank, as `HangWatchdog.read` returns them.
    """
    late, groups = [], {}
    for rank, place in enumerate(places):
        name = f"rank {rank} on {place['host']}"
        if not place["answers"]:
            late.append(f"{name}, whose process is stopped or gone; it was last seen {where(place)}")
        elif place["waits_in"] is None:
            late.append(f"{name}, which is {where(place)} since {place['since_s']:.0f} s")
        elif place["since_s"] >= patience_s:
            key = place["collectives"], place["waits_in"], place["at"], place["step"]
            groups.setdefault(key, []).append(rank)
    waits = [waiting(ranks, places[ranks[0]]) for ranks in groups.values()]
    if not waits:
        return None
    if late:
        return f"{waits[0]} for {', and for '.join(late[:MAX_PLACES])}"
    if sum(map(len, groups.values())) < len(places):
        return None  # a rank has just come
    if len(groups) > 1:
        numbers = [number for number, *_ in groups]
        waits = [f"{w}, its collective {n}" for w, n in zip(waits, numbers, strict=True)]
        return f"the ranks wait for each other: {'; '.join(waits[:MAX_PLACES])}"
    if places[0]["waits_in"] == "backward":
        return None  # all compute
    return f"all {waits[0]}: is the network between them at fault?"


def watch_ranks(timeout_s: float) -> None:
    """From now on, name ranks that others wait for. With one process it does nothing.

    Args:
        timeout_s: of the process group.
    """
    if HangWatchdog.current is not None:
        HangWatchdog.current.end()
        HangWatchdog.current = None
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        watchdog = HangWatchdog.current = HangWatchdog(timeout_s)
        # A thread in the middle of a call of the store would abort the interpreter's end.
        atexit.register(watchdog.end)
        watchdog.start()


def reached(step: int) -> None:
    """Say how many optimizer steps are done: the sentences name it."""
    if HangWatchdog.current is not None:
        HangWatchdog.current.step = step


def who_is_late() -> str | None:
    """What `sentence_about` last said, here or on another rank; for the sentence at the end."""
    watchdog = HangWatchdog.current
    if watchdog is None:
        return None
    if watchdog.found is None and watchdog.rank >= LOOKERS:
        with contextlib.suppress(Exception):  # the store may be gone
            if watchdog.store.check(["stalls/found"]):
                return watchdog.store.get("stalls/found").decode()
    sentence, said_at = watchdog.last_found
    return watchdog.found or (sentence if time.monotonic() - said_at < watchdog.silent_s else None)
