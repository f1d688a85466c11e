"""Hang watchdog: each rank whose micro-batch does not end says where it is; the rank at another line is behind."""

import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from accelerate import Accelerator

from ..console import show
from ..launched import has_launcher
from .errors import own_line

PATIENCE = 0.1  # a micro-batch that takes longer than this fraction of the timeout is reported,
SHORTEST_S = 6.0  # unless it is shorter than this: a busy machine may stop a process for a second or two
# What may take that long in a run that is all right: a checkpoint on a slow disk, a compilation.
CHECKPOINT = str(Path(__file__).parents[1] / "checkpoint")
LONG = (CHECKPOINT, "torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
newest: object | None = None  # one thread per process: that of the last run


def watch(accelerator: Accelerator, timeout_s: float) -> None:
    """Watch the thread that calls this from its first micro-batch on.

    A thread also ends a process that has lost its launcher for `timeout_s`: the kernel has sent SIGTERM, which a main
    thread that waits for a GPU cannot handle.
    """
    global newest
    mine = newest = object()
    watched, launcher = threading.get_ident(), os.getppid() if has_launcher() else None
    patience_s = max(PATIENCE * timeout_s, SHORTEST_S)

    def run() -> None:
        # Ticks are counted and not seconds, because a process may be stopped, as by Ctrl-Z.
        tick_s, ticks, counted, orphaned_s = patience_s / 20, 0, 0, 0.0
        while newest is mine:
            time.sleep(tick_s)
            orphaned_s += tick_s if launcher not in (None, os.getppid()) else 0
            if orphaned_s > timeout_s:
                os._exit(1)  # an unfinished checkpoint remains an unnamed temporary folder
            now = accelerator.micro_batches
            ticks, counted = ticks + 1 if 0 < now == counted else 0, now
            if not 10 < ticks <= 20:  # not the stack of a thread that runs: Python 3.11 may end with signal 11, or hang
                continue  # (github.com/python/cpython/issues/106883)
            stack = traceback.extract_stack(sys._current_frames().get(watched))
            if any(part in call.filename for call in stack for part in LONG):
                ticks = 0
            elif ticks == 20:  # once per micro-batch
                show(
                    f"warning: rank {accelerator.process_index} on {socket.gethostname()} has been in one micro-batch "
                    f"for {patience_s:.0f} s, after step {accelerator.steps_done}, at {own_line(stack)}; "
                    f"the run ends when a wait for another rank takes {timeout_s:.0f} s",
                    sys.stderr,
                )

    threading.Thread(target=run, name="watchdog", daemon=True).start()
