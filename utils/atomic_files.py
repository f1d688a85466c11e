"""The one writer of files: a file is there whole or not at all, after a power cut too."""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from .console import stop


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file with `save(temporary_path)`, then rename it to `path`.

    A reader sees the old file or the new one, never half of one. The content is on the disk before
    the file gets its name, so that it is not empty after a power cut.

    Args:
        save: writes the content to the path that it is given.

    Raises:
        SystemExit: if the file cannot be written (the disk is full, ...).
    """
    try:
        write_or_raise(path, save)
    except OSError as error:
        stop(f"{path} cannot be written: {error.strerror or error}")


def write_or_raise(path: Path, save: Callable[[Path], object]) -> None:
    """`write`, for files that a run can do without.

    Raises:
        OSError: if it cannot be written; and what `save` raises.
    """
    part = path.with_name(f".part_{path.name}")
    try:
        save(part)
        fsync_file(part)
        part.replace(path)
        fsync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_json(path: Path, content: dict) -> None:
    """Write `content` as indented JSON, as `write` does."""
    text = json.dumps(content, indent=2)
    # A list of numbers, such as a row of a confusion matrix, goes on one line.
    text = re.sub(r"\[[\d\s,]+\]", lambda row: " ".join(row[0].split()), text)
    write(path, lambda part: part.write_text(text + "\n"))


def write_synced(path: Path, content: bytes) -> None:
    """Write a file through to the disk, without a temporary name.

    Raises:
        OSError: if it cannot be written.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_entry(path: Path, name: str, kind: type):
    """What a JSON file has under `name`; None if there is no such file or entry."""
    try:
        entry = json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if isinstance(entry, kind) else None


def remove(path: Path) -> None:
    """Remove a folder with all in it, a file, or a link (not what it leads to), if it is there.

    Raises:
        OSError: if it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_file(path: Path) -> None:
    """Flush the content of a file that somebody else has written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder: fsync of a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder. A run must be possible on them.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
