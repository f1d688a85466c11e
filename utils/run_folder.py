"""The files of a run: run.json, metrics.jsonl and summary.json. Only the main process writes them."""

import errno
import fcntl
import json
import os
import sys
import time
from pathlib import Path

from accelerate import Accelerator

from .agree import on_main
from .atomic_files import fsync, read_entry, write_json
from .banner import describe_code
from .console import show, stop

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # a file system without flock, such as some of Lustre


def lock(file, timeout_s: float) -> None:
    """Lock a file for this process. Raises: BlockingIOError, if another one keeps it locked for `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.1)


class RunFolder:
    """Creates the folder of a run and locks it until the process ends, even by `kill -9`. Collective.

    Args:
        resume: whether the folder may already hold a run; None: no, and the script cannot resume.

    Attributes:
        has_checkpoint: whether the run continues from a checkpoint, which replaces all initial weights.
    """

    def __init__(self, accelerator: Accelerator, path: Path | str, resume: bool | None):
        self.path, self.resume, self.metrics_file = Path(path), resume, None
        self.metrics_path, self.summary_path = self.path / "metrics.jsonl", self.path / "summary.json"
        self.has_checkpoint = on_main(accelerator, self._claim)

    def _claim(self) -> bool:
        """Create and lock the folder; return whether it has a checkpoint."""
        try:
            if not self.path.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                fsync(self.path.parent)
            # The lock ends with the process. Not a file that stands for one: after `kill -9` it would stay.
            self.lock = open(self.path / ".lock", "w")  # noqa: SIM115  stays open
            lock(self.lock, 10 if self.resume else 0)  # a run that is being stopped may still be saving
        except BlockingIOError:
            stop(f"another run is writing to {self.path}: wait for it, or use a different --output_dir")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                stop(f"--output_dir {self.path} cannot be written to: {error.strerror}")
            show(f"warning: {self.path} cannot be locked ({error.strerror}): start no second run in it")
        # A power cut may have destroyed run.json; even so, checkpoints of two runs must not mix.
        has_checkpoint = any(self.path.glob("checkpoints/step_*"))
        if not self.resume and (has_checkpoint or (self.path / "run.json").exists()):
            advice = "" if self.resume is None else "add --resume to continue it, or "
            stop(f"{self.path} already holds a run: {advice}use a different --output_dir")
        return has_checkpoint

    def open(self, step: int, metrics_bytes: int, about_run: dict, about_launch: dict) -> None:
        """Write run.json, and open metrics.jsonl. On the main process.

        Args:
            step: optimizer steps done before this launch.
            metrics_bytes: the part of metrics.jsonl to keep: the run will repeat what follows.
            about_run, about_launch: entries of run.json about the whole run, and about this launch.
        """
        launches = read_entry(self.path / "run.json", "launches", list) if step else None
        launch = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": step, **about_launch}
        content = {**about_run, "command": sys.argv, **describe_code(), "launches": [*(launches or []), launch]}
        self.metrics_file = open(self.metrics_path, "ab")  # noqa: SIM115  stays open
        self.metrics_file.truncate(min(metrics_bytes, self.metrics_path.stat().st_size))
        self.metrics_file.seek(0, os.SEEK_END)
        write_json(self.path / "run.json", content)  # also flushes the folder, with the name of metrics.jsonl

    def write_metrics(self, line: dict) -> None:
        self.metrics_file.write(json.dumps(line).encode() + b"\n")
        self.metrics_file.flush()

    def metrics_bytes(self) -> int:
        """The current length of metrics.jsonl."""
        return 0 if self.metrics_file is None else self.metrics_file.tell()

    def read_summary(self, step: int) -> dict | None:
        """summary.json, if the run in this folder was completed at `step`. On the main process."""
        completed = read_entry(self.summary_path, "step", int) == step
        return json.loads(self.summary_path.read_text()) if completed and step else None
