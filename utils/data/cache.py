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
from ..run_folder import lock


def cache_folder(cache_dir: str | None, *names: str) -> Path:
    """A folder in the value of --cache_dir, or beside the cache of Hugging Face."""
    return Path(cache_dir or os.environ.get("HF_HOME", "~/.cache/huggingface"), *names).expanduser()


def file_signature(file: Path | str) -> list:
    """Path, size and time in ns, which differ after a file was changed."""
    about = os.stat(file)
    return [os.path.realpath(file), about.st_size, about.st_mtime_ns]


def build_once(folder: Path, build: Callable[[], dict | None]) -> dict | None:
    """What `build` returned when one process called it, with `folder` empty, to write files there.

    Several processes and several runs may need the folder at once. After a kill it is built anew, and also if one of
    its files is not what was written, by its size and time.
    """

    def read() -> dict:
        content, files = json.loads((folder / "manifest.json").read_text()).values()
        if any(file_signature(folder / name)[1:] != written for name, written in files.items()):
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
                    show(f"warning: {folder} is damaged or incomplete, and is built anew: {error!r:.200}")
                    shutil.rmtree(folder)
            folder.mkdir()
            content, paths = build(), [*folder.iterdir()]
            for path in paths:
                fsync(path)
            files = {path.name: file_signature(path)[1:] for path in paths}
            write_json(folder / "manifest.json", {"content": content, "files": files})
            return content
    except OSError as error:
        where = error.filename or folder
        stop(f"{where}: {error.strerror or error}: choose a folder with space and file locks by --cache_dir")
