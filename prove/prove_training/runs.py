"""Runs a script on several processes, each a fork of this one, where it cannot change files: see `sandbox.py`.

Importing torch and Accelerate takes longer than the few steps of a run, so it is done once.
"""

import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from . import recording, sandbox
from .recording.starting import lightning_of
from .records import Plan, Record
from .text import CannotTell, plural

SETTINGS = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
SETTINGS |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
DEATHS = {signal.SIGKILL: "as where memory runs out", signal.SIGSEGV: "in a library", signal.SIGBUS: "in a library"}
OF_PROCESSES = r"\b(?:(?:world_?)?size|n_?procs|num_processes|num_replicas|(?:n|num)_?gpus)\s*=\s*"
GRACE_S = 6  # for the other processes, once one has failed


class Outcome(NamedTuple):
    """The result of a run: the record of each rank, or why there is none."""

    records: list[Record]
    error: str | None  # of the first rank that failed
    changes: Path  # what the script has written
    waits: list[str]  # where each rank stood when time ran out
    log: list[str]  # what the rank that failed has printed
    calls: list[list[str]]  # collective calls of each rank: number of steps before it, name, line


class Runs:
    """Runs of one script.

    Args:
        script: of the user.
        flags: of the script.
        top: an empty folder.
        scratch: an empty folder for temporary files; its name must be short, for sockets.
        timeout_s: of each run.
        module: the name of the script, if it is run as a module.
    """

    def __init__(self, script: Path, flags: list[str], top: Path, scratch: Path, timeout_s: float, module=None):
        self.script, self.flags, self.timeout_s, self.module = script.resolve(), flags, max(timeout_s, 2), module
        self.top, self.scratch, self.cwd = top.resolve(), scratch.resolve(), Path.cwd().resolve()
        # The script may be outside the working directory: then its folder is protected as well.
        inside = self.script.is_relative_to(self.cwd)
        self.source = self.cwd if inside else self.script.parent
        self.folders = list(dict.fromkeys([self.source, self.cwd]))
        self.lightning = lightning_of(self.source)  # here, and not in each process of each run
        self.count = itertools.count(1)
        self.is_mounted = sandbox.can_mount(self.folders, self.scratch)
        self.can_forbid = not self.is_mounted and sandbox.can_forbid_writes()

    def __call__(self, processes: int, plan: Plan, flags: list[str] = (), changes: Path | None = None) -> Outcome:
        """Run the script.

        Args:
            plan: its processes and folders are set here.
            flags: more of them.
            changes: of an earlier run, to continue from.

        Raises:
            CannotTell: where a process dies that has no error of Python.
        """
        output = self.top / f"run_{next(self.count)}"
        output.mkdir()
        if changes is None:
            changes = output / "changes"
            changes.mkdir()
            for number, folder in enumerate([] if self.is_mounted else self.folders):
                sandbox.copy_folder(folder, changes / str(number), may_link=self.can_forbid)
        root = self.source if self.is_mounted else changes / "0"
        plan = replace(plan, processes=processes, folder=str(root), output=str(output), lightning=self.lightning)
        pid = sandbox.forked(self._supervise, plan, changes, [*self.flags, *flags])
        try:
            is_over = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        except BaseException:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
        for work in changes.glob("*/work"):  # overlayfs leaves folders that cannot be read
            for folder in work.iterdir():
                folder.chmod(0o700)
            shutil.rmtree(work)
        return self._outcome(output, processes, changes, is_over)

    def _supervise(self, plan: Plan, changes: Path, flags: list[str]) -> int:
        """Start the ranks, wait for them, and end all processes they leave behind. Returns 1 if time ran out."""
        ranks = {}
        plan.time_is_over, self.alarm = os.pipe()  # its other end is closed when time is over
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process gets it, too, and sends the other one
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
            sandbox.adopt()
            self._enter(changes)
            plan.address = self._address()
            if plan.asked:
                script = self._script(plan)
                text = script.read_text("utf-8", "surrogateescape")
                text = numbers_of_processes(plan.asked).sub(rf"\g<1>{plan.processes}", text)
                script.write_text(text, "utf-8", "surrogateescape")
            for rank in range(plan.processes):
                ranks[sandbox.forked(self._rank, plan, rank, flags)] = rank
            return int(self._wait(ranks, Path(plan.output)))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one comes with the end of the parent process
            sandbox.end_children(list(ranks))

    def _enter(self, changes: Path) -> None:
        """Go where the script will run."""
        if self.is_mounted:
            sandbox.copy_on_write(self.folders, self.top, changes.relative_to(self.top))
            os.chdir(self.cwd)
            return
        if self.can_forbid:
            sandbox.forbid_writes([self.top, self.scratch, Path("/dev"), *sandbox.caches()])
        os.environ["TMPDIR"] = str(self.scratch)
        os.chdir(changes / str(self.folders.index(self.cwd)))

    def _address(self) -> dict[str, str]:
        """A free port below those that the system gives to other programs before the script takes it."""
        for port in itertools.count(10_000 + os.getpid() % 20_000):
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def _variables(self, plan: Plan, rank: int) -> dict[str, str]:
        """As torchrun sets them."""
        on_machine = (rank, plan.processes, 0) if not plan.machines else (0, 1, rank)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK", "WORLD_SIZE")
        variables = dict(zip(names, map(str, (*on_machine, rank, plan.processes)), strict=True))
        variables |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
        return SETTINGS | variables | plan.address

    def _rank(self, plan: Plan, rank: int, flags: list[str]) -> None:
        """Run the script in this process, which ends."""
        os.setsid()
        os.close(self.alarm)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(Path(plan.output, f"log_{rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        sys.stdin = open(0)  # noqa: SIM115  until the end, as the others
        sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115

        def filled(text: str) -> str:
            return text.replace("{processes}", str(plan.processes)).replace("{rank}", str(rank))

        flags = [filled(flag) for flag in flags]
        os.environ.update({name: filled(value) for name, value in os.environ.items()} | self._variables(plan, rank))
        recording.main(plan, rank, str(self._script(plan)), self.module, flags)

    def _script(self, plan: Plan) -> Path:
        return Path(plan.folder, self.script.relative_to(self.source))

    def written(self, asked: int) -> str:
        """Where this number of processes is written in the script, as "world_size = 2"; "" if it is not."""
        found = numbers_of_processes(asked).search(self.script.read_text("utf-8", "replace"))
        return found[0] if found else ""

    def _wait(self, ranks: dict[int, int], output: Path) -> bool:
        """Wait for all processes, longer on a busy machine. Returns whether time ran out."""
        begin, left, limits = time.monotonic(), set(ranks), [self.timeout_s]
        while left:
            passed = (time.monotonic() - begin) / sandbox.slowness()
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.remove(pid)
                    is_recorded = (output / f"record_{ranks[pid]}.pt").exists()
                    if not is_recorded or status:
                        limits.append(passed + GRACE_S)
                    if not is_recorded and os.WIFSIGNALED(status):
                        (output / "died").write_text(str(os.WTERMSIG(status)))
            if left and passed > min(limits):
                if self.alarm is None:
                    return True
                os.close(self.alarm)
                self.alarm, limits = None, [passed + GRACE_S]
            time.sleep(0.01)
        return self.alarm is None

    def _outcome(self, output: Path, processes: int, changes: Path, is_over: bool) -> Outcome:
        import torch

        died = "".join(lines_of(output / "died"))
        if why := DEATHS.get(int(died or 0)):
            raise CannotTell(f"on {plural(processes, 'process')} one dies of {signal.Signals(int(died)).name}, {why}")
        files = [output / f"record_{rank}.pt" for rank in range(processes)]
        records = [torch.load(file, "cpu", weights_only=False) for file in files if file.exists()]
        waits = [f"rank {each.rank} waits {each.waits}" for each in records if each.waits]
        # The cause before its consequences.
        errors = sorted((each for each in records if each.error), key=lambda each: "onnection" in each.error)
        error, log = None, []
        if errors or (len(records) < processes and not waits):
            missing = [rank for rank, file in enumerate(files) if not file.exists()]
            died = f"it did not end in {self.timeout_s:g} s" if is_over else "a process ended without a record"
            error, failed = (errors[0].error, errors[0].rank) if errors else (died, missing[0])
            log = lines_of(output / f"log_{failed}.txt")
        calls = [lines_of(output / f"calls_{rank}.txt") for rank in range(processes)]
        return Outcome(records, error, changes, [] if error else waits, log, calls)


def numbers_of_processes(asked: int) -> re.Pattern:
    """Finds this number where a script has it as that of its processes; group 1 is what stands before."""
    return re.compile(rf"({OF_PROCESSES}){asked}\b", re.IGNORECASE)


def lines_of(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.exists() else []
