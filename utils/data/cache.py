"""Folders in the cache that one process builds once from the data, while the others wait."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from ..atomic_files import fsync, write_json
from ..console import is_local_main, show, stop
from ..fingerprint import digest
from ..run_folder import lock

SAMPLES, SAMPLE = 64, 4096  # how many parts of a file are in its digest, and their bytes


def cache_folder(cache_dir: str | None, *names: str) -> Path:
    """A folder in the value of --cache_dir, or beside the cache of Hugging Face."""
    return Path(cache_dir or os.environ.get("HF_HOME", "~/.cache/huggingface"), *names).expanduser()


def file_signature(file: Path | str) -> list:
    """Path, size and time in ns, which differ after a file was changed."""
    about = os.stat(file)
    return [os.path.realpath(file), about.st_size, about.st_mtime_ns]


def sample_digest(file: Path) -> list:
    """The size of a file and a digest of SAMPLES parts of it: of all of it takes too long."""
    size = file.stat().st_size
    with open(file, "rb") as content:
        starts = (max(size - SAMPLE, 0) * number // (SAMPLES - 1) for number in range(SAMPLES))
        return [size, digest([os.pread(content.fileno(), SAMPLE, start).hex() for start in starts])]


def build_once(folder: Path, build: Callable[[], dict | None]) -> dict | None:
    """What `build` returned when one process called it, with `folder` empty, to write files there.

    Several processes and several runs may need the folder at once. After a kill it is built anew, and also if one of
    its files is not what was written.
    """

    def read() -> dict:
        content, files, written = json.loads((folder / "manifest.json").read_text()).values()
        if digest(json.dumps([content, files])) != written or any(sample_digest(folder / n) != files[n] for n in files):
            raise ValueError("a file is not what was written")
        return content

    with contextlib.suppress(Exception):
        return read()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        time.sleep(0 if is_local_main() else 1)  # the process that prints goes first
        # Without a lock, two processes would write into one file: a file system that has none is refused.
        with open(folder.with_suffix(".lock"), "w") as locked:
            lock(locked, math.inf)  # not a barrier of the processes, which ends after 10 minutes
            try:
                return read()
            except Exception as error:  # not there, or damaged: of many types
                if folder.exists():
                    show(f"warning: {folder} is damaged or incomplete, and is built anew: {error!r:.200}", "yellow")
                    shutil.rmtree(folder)
            folder.mkdir()
            content, paths = build(), [*folder.iterdir()]
            for path in paths:
                fsync(path)
            files = {path.name: sample_digest(path) for path in paths}
            manifest = {"content": content, "files": files, "digest": digest(json.dumps([content, files]))}
            write_json(folder / "manifest.json", manifest)
            return content
    except Exception as error:
        error = error.__cause__ if isinstance(error.__cause__, OSError) else error  # `datasets` wraps it
        if not isinstance(error, OSError):
            raise
        stop(
            f"{error.filename or folder}: {error.strerror or error}: choose a folder to write and lock with --cache_dir"
        )
