"""A cache of files that are built once from the data, such as tokens."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from utils.atomic_files import write_json
from utils.console import is_local_main, show, stop
from utils.fingerprint import digest
from utils.run_folder import lock

SAMPLES, SAMPLE = 64, 4096  # how many parts of a file are in its digest, and their bytes


def cache_folder(cache_dir: str | None, kind: str) -> Path:
    """The folder `kind` in the value of --cache_dir, or beside the cache of Hugging Face."""
    return Path(cache_dir or os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / kind


def file_signature(file: Path | str) -> list:
    """Path, size and time in ns, which differ after a file was changed. Raises: SystemExit, if it does not exist."""
    try:
        about = os.stat(file)
    except OSError as error:
        stop(f"{file} cannot be read: {error.strerror}")
    return [os.path.realpath(file), about.st_size, about.st_mtime_ns]


def sample_digest(file: Path, size: int | None = None) -> list:
    """The size of a file, or `size`, and a digest of SAMPLES parts of so many bytes: of all of it takes too long."""
    size = file.stat().st_size if size is None else size
    sha = hashlib.sha256()
    with open(file, "rb") as content:
        for number in range(SAMPLES):
            content.seek(max(size - SAMPLE, 0) * number // (SAMPLES - 1))
            sha.update(content.read(min(SAMPLE, size)))
    return [size, sha.hexdigest()[:16]]


def write_manifest(file: Path, content: dict, names: Iterable[str]) -> None:
    """Write a JSON file with digests of the files in its folder with these names, and of its own content."""
    content = content | {"digests": {name: sample_digest(file.parent / name) for name in names}}
    write_json(file, content | {"digest": digest(json.dumps(content))})


def read_manifest(file: Path, may_be_longer: Iterable[str] = ()) -> dict:
    """What `write_manifest` wrote. Raises: ValueError, if one of the files has changed since; some may be longer."""
    manifest = json.loads(file.read_text())
    if manifest.pop("digest") != digest(json.dumps(manifest)):
        raise ValueError(f"{file.name} was changed")
    for name, expected in manifest["digests"].items():
        if sample_digest(file.parent / name, expected[0] if name in may_be_longer else None) != expected:
            raise ValueError(f"{name} was changed")
    return manifest


def read_intact(read: Callable, folder: Path, description: str):
    """What `read()` returns; None if it is not there, or, with a warning, if it is damaged."""
    try:
        return read()
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file: of many types
        show(f"warning: {description} in {folder} cannot be used and will be built anew: {error!r:.200}", "yellow")


def build_cached(read: Callable, build: Callable[[], None], folder: Path, description: str):
    """What `read()` returns, after one process has called `build` where it raises an error; the others wait for it."""
    with contextlib.suppress(Exception):
        return read()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_local_main():
            time.sleep(1)  # the process that prints goes first
        # Without a lock, two processes would write into one file: a file system that has none is refused.
        with open(folder / ".lock", "w") as locked:
            lock(locked, math.inf)
            try:
                if (content := read_intact(read, folder, description)) is None:
                    build()
                    content = read()
                return content
            finally:  # closing it is not enough: workers that `build` has started have it open, too
                fcntl.flock(locked, fcntl.LOCK_UN)
    except OSError as error:
        stop(
            f"{description} cannot be kept in {folder} ({error.filename or ''} {error.strerror}): choose a folder that "
            "can be written and locked with --cache_dir"
        )
