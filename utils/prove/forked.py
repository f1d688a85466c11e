"""Runs a script on several processes, each a fork of this one, in a copy of the user's folder.

To import torch and Accelerate takes longer than the few steps that a script is run for: that is done once.
"""

import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from . import watch

COPIED_BYTES = 2_000_000  # a larger file is linked
MOST_FILES = 3_000  # folders after so many files are linked
NOT_COPIED = {".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
GRACE_S = 4  # for the other processes, when one has failed


class Outcome(NamedTuple):
    """What a run has left: the record of each rank, or why there is none."""

    records: list[dict]
    error: str | None  # of the first rank that failed
    folder: Path  # the copy
    waits: list[str]  # where each rank stood when the time was over
    calls: list[list[str]]  # the collective calls of each rank: after how many steps, the name, the line


def copy_folder(source: Path, target: Path) -> None:
    """Copy what a script may read or write; large files and folders are linked."""
    target.mkdir(parents=True)
    left = itertools.count(MOST_FILES, -1)
    waiting = [(source, target)]
    while waiting:
        folder, copy = waiting.pop(0)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            place = copy / entry.name
            if entry.name in NOT_COPIED or target.is_relative_to(entry.path):
                continue
            if entry.is_dir(follow_symlinks=False) and next(left) > 0:
                place.mkdir()
                waiting.append((Path(entry.path), place))
            elif entry.is_file(follow_symlinks=False) and entry.stat().st_size <= COPIED_BYTES and next(left) > 0:
                shutil.copy2(entry.path, place)
            elif entry.is_file() or entry.is_dir():
                place.symlink_to(Path(entry.path).resolve())


def guard(folders: list[Path]) -> None:
    """From now on this process raises an error instead of writing to one of these folders."""
    names = [str(folder) + os.sep for folder in folders]
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changes = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            path, _, flags = args
            paths = [path] if isinstance(flags, int) and flags & writes else []
        elif event in changes:
            paths = args[:2]
        else:
            return
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)):
                real = os.path.realpath(os.fsdecode(path))
                if any(real.startswith(name) for name in names):
                    raise PermissionError(f"prove does not let it write to {os.fsdecode(path)}")

    sys.addaudithook(hook)


class Runs:
    """Runs of one script.

    Args:
        script: of the user.
        flags: of the script.
        top: an empty folder.
        timeout_s: of each run.
    """

    def __init__(self, script: Path, flags: list[str], top: Path, timeout_s: float):
        self.script, self.flags, self.top, self.timeout_s = script.resolve(), flags, top.resolve(), timeout_s
        self.cwd = Path.cwd().resolve()
        # The script and its folder are copied as well, where they are elsewhere.
        inside = self.script.is_relative_to(self.cwd)
        self.source = self.cwd if inside else self.script.parent
        self.count = itertools.count(1)

    def __call__(self, processes: int, plan: dict, flags: list[str] = (), folder: Path | None = None) -> Outcome:
        """Run the script.

        Args:
            plan: for `watch.Watch`.
            flags: more of them.
            folder: of an earlier run, to go on in.
        """
        output = self.top / f"run_{next(self.count)}"
        output.mkdir()
        if folder is None:
            folder = output / "folder"
            copy_folder(self.source, folder)
        defaults = {"is_resumed": None, "stop_after_save": False, "own_batch_size": False, "without_gpu": False}
        plan = defaults | {"shorter": []} | plan
        plan |= {"processes": processes, "folder": str(folder), "output": str(output)}
        plan["timeout_s"] = max(self.timeout_s, 2)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        variables |= {"LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"ACCELERATE_MIXED_PRECISION": "no", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        variables |= {"TORCHELASTIC_RUN_ID": "prove", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0"}
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = {}
        for rank in range(processes):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks[self._fork(plan, rank, own, [*self.flags, *flags])] = rank
        try:
            is_over = self._wait(ranks, output)
        finally:
            for pid in ranks:
                end_session(pid)
        return self._outcome(output, processes, folder, is_over)

    def _fork(self, plan: dict, rank: int, variables: dict, flags: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:  # the new process
            os.setsid()
            output, folder = Path(plan["output"]), Path(plan["folder"])
            log = os.open(output / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            logging.root.handlers.clear()
            logging.root.setLevel(logging.WARNING)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115  until the end
            os.environ.update(variables)
            os.chdir(folder if self.cwd == self.source else self._beside(folder))
            guard([self.cwd, self.source])
            watch.main(plan, rank, str(folder / self.script.relative_to(self.source)), flags)
        except BaseException:  # this process must not return to what its parent was doing
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _beside(self, folder: Path) -> Path:
        """A copy of the working directory, where the script is elsewhere."""
        copy = folder.with_name("working_directory")
        with_lock = copy.with_suffix(".made")
        try:
            with_lock.mkdir()
        except FileExistsError:
            while not (with_lock / "whole").exists():
                time.sleep(0.01)
        else:
            copy_folder(self.cwd, copy)
            (with_lock / "whole").touch()
        return copy

    def _wait(self, ranks: dict[int, int], output: Path) -> bool:
        """Wait for all processes. Returns whether the time was over."""
        ends, left = time.monotonic() + self.timeout_s, set(ranks)
        while left:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.remove(pid)
                    if not (output / f"record_{ranks[pid]}.pt").exists() or status:
                        ends = min(ends, time.monotonic() + GRACE_S)
            if left and time.monotonic() > ends:
                return True
            time.sleep(0.01)
        return False

    def _outcome(self, output: Path, processes: int, folder: Path, is_over: bool) -> Outcome:
        import torch

        records, errors, waits, calls = [], [], [], []
        for rank in range(processes):
            path = output / f"calls_{rank}.txt"
            calls.append(path.read_text().splitlines() if path.exists() else [])
            path = output / f"record_{rank}.pt"
            if path.exists():
                records.append(torch.load(path, weights_only=False))
                if records[-1]["error"]:
                    errors.append(records[-1]["error"])
                if records[-1]["waits"]:
                    waits.append(f"rank {rank} at {records[-1]['waits']}")
        error = None
        if errors:
            error = min(errors, key=lambda text: "onnection" in text)  # rather the cause than what followed
        elif len(records) < processes and not waits:
            error = f"it did not end in {self.timeout_s:g} s" if is_over else "a process ended without a record"
        return Outcome(records, error, folder, [] if error else waits, calls)


def end_session(pid: int) -> None:
    """End a process that leads a session, and all others in it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # it has ended before
