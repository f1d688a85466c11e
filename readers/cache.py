"""What a run makes once from its data, such as tokens, in a folder where later runs find it."""

import fcntl
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from utils.console import is_local_main, stop
from utils.run_folder import NO_LOCKS, lock


def cache_folder(cache_dir: str | None, kind: str) -> Path:
    """The folder `kind` in the value of --cache_dir, or beside the cache of Hugging Face."""
    return Path(cache_dir or os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / kind


def identity(file: Path) -> list:
    """What changes when a file does: path, bytes, time in ns. Raises: SystemExit, if there is no such file."""
    try:
        about = file.stat()
    except OSError as error:
        stop(f"{file} cannot be read: {error.strerror}")
    return [str(file.resolve()), about.st_size, about.st_mtime_ns]


def make_once(files: list[Path], make: Callable[[], object], what: str) -> None:
    """Call `make` unless all `files`, in one folder, are there; one process does, and the others wait for it."""
    if all(file.exists() for file in files):
        return
    folder = files[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_local_main():
            time.sleep(1)  # the process that prints goes first
        with open(folder / ".lock", "w") as locked:
            try:
                lock(locked, math.inf)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            try:
                if not all(file.exists() for file in files):
                    make()
            finally:  # closing it is not enough: workers that `make` has started have it open, too
                fcntl.flock(locked, fcntl.LOCK_UN)
    except OSError as error:
        stop(f"{what} cannot be kept in {folder} ({error.filename or ''} {error.strerror}): see --cache_dir")
