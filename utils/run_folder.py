"""What a run leaves in its folder: run.json, metrics.jsonl and summary.json. The main process alone writes."""

import json
import os
import sys
import time
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from .atomic_files import fsync, read_entry, write_json
from .console import plural, stop
from .extras.banner import describe_code


class RunFolder:
    """The folder of one run. Collective.

    Makes it and locks it until the process ends; the kernel releases the lock after a
    `kill -9` too.

    Args:
        path: of the folder.
        resume: whether it may hold a run; None: as False, in a script that cannot resume.

    Raises:
        SystemExit: on every rank, if the folder holds a run and `resume` is not set, if another process writes to it,
            or if it cannot be written to.
    """

    def __init__(self, accelerator: Accelerator, path: Path | str, resume: bool | None):
        self.path, self.resume = Path(path), resume
        self.metrics_file = None
        problem = self._claim() if accelerator.is_main_process else None
        problem = broadcast_object_list([problem])[0]
        if problem:
            stop(problem)

    def _claim(self) -> str | None:
        try:
            if not self.path.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                fsync(self.path.parent)
            self.lock = FileLock(self.path / ".lock")
            # A run that was told to stop may still be saving.
            self.lock.acquire(timeout=10 if self.resume else 0)
        except Timeout:
            return f"another run is writing to {self.path}: wait for it, or take another --output_dir"
        except OSError as error:
            return f"--output_dir {self.path} cannot be written to: {error.strerror}"
        # Also without run.json, which a power cut may have taken: the checkpoints would be mixed.
        holds_a_run = any(any(self.path.glob(name)) for name in ("run.json", "checkpoints/step_*"))
        if not self.resume and holds_a_run:
            way_out = "" if self.resume is None else "add --resume to continue it, or "
            return f"{self.path} already holds a run: {way_out}take another --output_dir"
        return None

    def open(self, step: int, metrics_bytes: int, about_run: dict, about_launch: dict) -> None:
        """Write run.json, and begin metrics.jsonl after its first `metrics_bytes` bytes. On the main process.

        Lines after these are dropped: the run will write them again.

        Args:
            step: optimizer steps done before this launch.
            about_run, about_launch: for run.json, what holds for the run, and for this launch of it.
        """
        launches = read_entry(self.path / "run.json", "launches", list) if step else None
        launch = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": step, **about_launch}
        content = {**about_run, "command": sys.argv, **describe_code(), "launches": [*(launches or []), launch]}
        path = self.path / "metrics.jsonl"
        try:
            self.metrics_file = open(path, "ab")  # noqa: SIM115  until the end
        except OSError as error:  # it may be another user's
            stop(f"{path} cannot be written: {error.strerror}")
        self.metrics_file.truncate(min(metrics_bytes, path.stat().st_size))
        self.metrics_file.seek(0, os.SEEK_END)
        write_json(self.path / "run.json", content)  # and flushes the name of metrics.jsonl too

    def write_metrics(self, line: dict) -> None:
        """Add a line to metrics.jsonl. Raises: SystemExit, if that cannot be written."""
        try:
            self.metrics_file.write(json.dumps(line).encode() + b"\n")
            self.metrics_file.flush()
        except OSError as error:
            stop(f"{self.path}/metrics.jsonl cannot be written ({error.strerror}); continue with --resume when it can")

    def metrics_bytes(self) -> int:
        """The length of metrics.jsonl: a checkpoint's place in the file."""
        return 0 if self.metrics_file is None else self.metrics_file.tell()

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk. In any thread."""
        os.fsync(self.metrics_file.fileno())

    def write_summary(self, summary: dict) -> None:
        write_json(self.path / "summary.json", summary)

    def exit_if_completed(self, accelerator: Accelerator, step: int, total_steps: int) -> None:
        """End the process with exit code 0 if the run in this folder was completed at `step`. Collective."""
        completed = None
        if accelerator.is_main_process:
            completed = read_entry(self.path / "summary.json", "step", int)
        if step == 0 or broadcast_object_list([completed])[0] != step:
            return
        done = f"all {step} steps are done"
        if step < total_steps:
            done = f"the run stopped early, after {plural(step, 'step')}"
        accelerator.print(f"{done}: nothing to do")
        accelerator.end_training()
        raise SystemExit(0)
