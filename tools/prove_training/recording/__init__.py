"""Runs any script as `__main__`, and records what it does in each step: nothing that it sees has another type.

`main` is called in a process of its own, which `runs.py` has forked. Each process leaves a record, a dict:

    steps         of each optimizer.step(): its micro-batches (samples by their digests, coefficients of the losses,
                  whether gradients are reduced), gradients before clipping and at the step, learning rates, weights
    evaluations   samples, collectives and lines of output between two steps in which nothing was trained
    saves         what torch.save and save_state were given
    facts         what the script uses
"""

import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

import torch

from ..same_work import OnCpu, SwitchedOff
from . import data, evaluations, files, global_loader, models, processes, where

SECONDS_TO_END = 3.0  # for what the script does after its last epoch


class Recording:
    """What happens in this process: the state that all recorders share, and the end.

    Args:
        plan: of this run; see `runs.py`.
        rank: of this process.
    """

    def __init__(self, plan: dict, rank: int):
        self.plan, self.rank = plan, rank
        self.where = where.Where(plan["folder"])
        self.off = SwitchedOff(self)
        self.steps = []
        self.new_step()
        self.facts = {"is_complete": False, "refuses": False, "run": "", "is_finished": False, "virtual_processes": 0}
        self.facts["flags"] = []
        self.is_ending, self.has_ended = False, False
        self.lock, self.torch_save = threading.Lock(), torch.save
        self.batches = data.Batches(self)
        self.models = models.Models(self)
        self.evaluations = evaluations.Evaluations(self)
        self.processes = processes.Processes(self)
        self.files = files.Files(self)

    def install(self) -> None:
        """Put all wrappers in place, before the script is imported."""
        self.off.install()
        for part in (self.batches, self.models, self.evaluations, self.processes, self.files):
            part.install()
        global_loader.install(self)
        if self.plan["without_gpu"]:
            OnCpu().install()

    def new_step(self) -> None:
        self.step = {"micro_batches": [], "clips": [], "gradients": {}, "collectives": []}

    def begin_to_end(self) -> None:
        """The script has trained enough; what it does after its last epoch may take a little longer."""
        self.evaluations.end()
        self.is_ending = self.facts["is_complete"] = True
        start_timer(SECONDS_TO_END, self.end)

    def end_waiting(self) -> None:
        """The time is over: end, and say where the script stands."""
        frame = sys._current_frames()[threading.main_thread().ident]
        place = self.where.last_of(traceback.extract_stack(frame))
        self.end(waits=None if self.is_ending else place or "?")

    def end(self, error: str | None = None, waits: str | None = None) -> None:
        """Write the record, and end this process."""
        with self.lock:
            if not self.has_ended:
                self.has_ended = True
                self._write(error, waits)
            sys.stdout.flush()
            os._exit(1 if error else 0)

    def _write(self, error: str | None, waits: str | None) -> None:
        self.evaluations.end()
        self.facts["switched_off"] = sorted(self.off.switched_off)
        record = {"rank": self.rank, "error": error, "waits": waits, "facts": self.facts, "steps": self.steps}
        for part in (self.batches, self.models, self.evaluations, self.processes, self.files):
            facts, entries = part.result()
            self.facts |= facts
            record |= entries
        path = Path(self.plan["output"], f"record_{self.rank}.pt")
        self.torch_save(record, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def start_timer(seconds: float, function) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


def main(plan: dict, rank: int, script: str, flags: list[str]) -> None:
    """Run a script, leave a record, and end this process.

    Args:
        script: its path where it runs.
    """
    recording = Recording(plan, rank)
    sys.argv = [script, *flags]
    sys.path.insert(0, os.path.dirname(script))
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    recording.install()
    start_timer(plan["timeout_s"] - 1, recording.end_waiting)
    error = None
    try:
        runpy.run_path(script, run_name="__main__")
        recording.facts["is_complete"] = True
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            error = f"it ends with {stopped.code}"
    except BaseException as raised:  # whatever it is, it goes into the record
        traceback.print_exc()
        frames = traceback.extract_tb(raised.__traceback__)
        place = recording.where.last_of(frames)
        words = str(raised).strip().splitlines() or [""]
        error = f"{place}: " * bool(place) + f"{type(raised).__name__}: {words[0][:300]}"
        # The script itself has raised it, and on purpose.
        is_meant = isinstance(raised, (AssertionError, ValueError, RuntimeError))
        recording.facts["refuses"] = is_meant and bool(frames) and recording.where.is_own(frames[-1].filename)
    recording.end(None if recording.is_ending else error)
