"""Runs any script as `__main__`, and records what it does in each step. No object that it sees changes its type.

`main` is called in a process of its own, which `runs.py` has forked; each process leaves a Record (`records.py`).
"""

import contextlib
import os
import random
import runpy
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import torch

from .. import imports
from ..records import Plan, Record, Step
from ..sandbox import slowness
from ..text import CannotTell, without_colours
from . import data, evaluations, files, global_loader, models, noise, processes, same_work, starting, where

SECONDS_TO_END = 4  # what the script may take after its last epoch


class Recording:
    """The record of this process, and the recorders that fill it.

    Args:
        plan: of this run; see `runs.py`.
        rank: of this process.
    """

    def __init__(self, plan: Plan, rank: int):
        self.plan, self.rank = plan, rank
        self.where = where.Where(plan.folder)
        self.record = Record(rank)
        self.facts, self.steps, self.saves = self.record.facts, self.record.steps, self.record.saves
        self.new_step()
        self.is_ending, self.has_ended = False, False
        self.lock, self.torch_save, self.exit = threading.Lock(), torch.save, os._exit
        self.batches = data.Batches(self)
        self.models = models.Models(self)
        self.evaluations = evaluations.Evaluations(self)
        self.processes = processes.Processes(self)

    def install(self) -> None:
        """Put all wrappers in place, before the script is imported."""
        for part in (same_work, data, models, noise, evaluations, processes, starting, files, global_loader):
            part.install(self)
        pid = os.getpid()  # and not that of a data worker
        os._exit = lambda status: self.end_by_exit(status) if os.getpid() == pid else self.exit(status)
        imports.replace(where.replacements)

    def new_step(self) -> None:
        self.step = Step()

    def begin_to_end(self) -> None:
        """The script has trained enough; it gets a little time for what comes after its last epoch."""
        self.evaluations.end(self.batches.draws())
        self.is_ending = self.facts.is_complete = True
        timer = threading.Timer(SECONDS_TO_END * slowness(), self.end)
        timer.daemon = True
        timer.start()

    def stop(self, reason: str) -> None:
        """There can be no verdict."""
        self.facts.cannot_tell = reason
        self.end()

    def end_by_exit(self, status: int) -> None:
        """The script itself ends the process at once."""
        self.facts.is_complete = True
        self.end(f"it ends with {status}" if status else None)

    def end_waiting(self) -> None:
        """Time ran out: end, and record where the script stands."""
        frame = sys._current_frames()[threading.main_thread().ident]
        self.end(waits=None if self.is_ending else self.where.doing(traceback.extract_stack(frame)))

    def end(self, error: str | None = None, waits: str | None = None) -> None:
        """Write the record, and end this process."""
        with self.lock:
            if not self.has_ended:
                self.has_ended = True
                self.evaluations.end(self.batches.draws())
                final = self.models.tensors_of() if self.facts.is_exact else {}
                self.record.error, self.record.waits, self.record.final = error, waits, final
                self.facts.waiting = len(self.step.micro_batches)
                self.facts.untrained, self.facts.schedules = self.models.untrained(), len(self.models.schedules)
                self.facts.strips_prefix = self.where.has("'module.", '"module.')
                self.facts.loads = bool(self.saves) and self.where.has("load_state")
                self.record.printed = self.evaluations.last_line
                path = Path(self.plan.output, f"record_{self.rank}.pt")
                self.torch_save(self.record, path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)
            with contextlib.suppress(Exception):  # of a stream of the script's own
                sys.stdout.flush()
            self.exit(1 if error or self.facts.cannot_tell else 0)


def main(plan: Plan, rank: int, script: str, module: str | None, flags: list[str]) -> None:
    """Run a script, leave a record, and end this process.

    Args:
        script: its path where it runs.
        module: its name, if it is run as a module.
    """
    recording = Recording(plan, rank)
    sys.argv = [script, *flags]
    folder = Path(script).parent
    if module:  # the folder that its name begins in
        folder = Path(script).parents[module.count(".") + (Path(script).name == "__main__.py")]
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):  # a fork has the states of its parent
        seed(100 + rank)
    recording.install()
    waiting = threading.Thread(target=lambda: os.read(plan.time_is_over, 1) or recording.end_waiting(), daemon=True)
    waiting.start()
    error = None
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        recording.facts.is_complete = True
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            error = f"it ends with {stopped.code}"
            recording.facts.refuses = not recording.steps
    except BaseException as raised:  # every error goes into the record
        shown = traceback.TracebackException.from_exception(raised)
        shown.stack[:] = [
            frame for frame in shown.stack if not frame.filename.startswith((where.OWN_FOLDER, "<frozen"))
        ]
        os.write(2, "".join(shown.format()).encode(errors="replace"))  # sys.stderr and print() may be the script's own
        frames = traceback.extract_tb(raised.__traceback__)
        place = recording.where.last_of(frames)
        words = without_colours(str(raised)).strip().splitlines() or [""]
        error = f"{place}: " * bool(place) + f"{type(raised).__name__}: {words[0][:300]}".removesuffix(": ")
        recording.record.doing = recording.where.doing(frames)
        recording.record.unused = recording.models.unused(str(raised))
        if isinstance(raised, CannotTell):
            recording.facts.cannot_tell = str(raised)
        elif isinstance(raised, EOFError):
            recording.facts.cannot_tell = f"it asks for input ({place}), and prove gives none"
        elif where.is_own_fault(frames):
            recording.facts.cannot_tell = f"prove has a fault of its own: {error}"
        # The script itself raised it, on purpose.
        is_meant = isinstance(raised, (AssertionError, ValueError, RuntimeError))
        is_meant &= not recording.is_ending  # then it may be for want of data
        recording.facts.refuses = is_meant and bool(frames) and recording.where.is_own(frames[-1].filename)
    recording.end(None if recording.is_ending else error)
