"""Files that are there whole or not at all, after a power cut too."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file with `save(temporary_path)`, flush it to the disk, then rename it to `path`.

    Raises:
        OSError: if the file cannot be written; and what `save` raises.
    """
    part = path.with_name(f".part_{path.name}")
    try:
        save(part)
        fsync(part)
        part.replace(path)
        fsync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_json(path: Path, content: dict) -> None:
    """Write indented JSON as `write_atomically` does, other objects as text."""
    write_atomically(path, lambda part: part.write_text(json.dumps(content, indent=2, default=str) + "\n"))


def read_entry(path: Path, name: str, kind: type):
    """The entry `name` of a JSON file; None if there is no such file, or no such entry of type `kind`."""
    try:
        entry = json.loads(path.read_text())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return entry if isinstance(entry, kind) else None


def fsync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder: fsync of a file does not cover its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)
