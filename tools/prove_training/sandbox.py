"""Lets a script write where it likes, and keeps every file of the user as it is.

Where Linux lets us mount, the script runs at its own path in a mount namespace of its own: its folder, the home folder
and the temporary folder are copy-on-write (overlayfs: only what is written to is copied), and all else is read-only.
Elsewhere it runs in a copy, and Landlock, where Linux has it, forbids it to write to anything else.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

IS_LINUX = sys.platform == "linux"
COPIED_BYTES = 500_000_000  # of a copy, together
COPIED_FILES = 3_000
WATCHED_FILES = 100_000
NOT_COPIED = {".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}

# Of the kernel's headers: sched.h, mount.h, prctl.h, landlock.h.
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
AT_RECURSIVE, READ_ONLY, MOUNT_SETATTR = 0x8000, 1, 442
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38
LANDLOCK, LANDLOCK_TRUNCATE = 444, 3  # the first of three system calls; the version that knows truncate()
WRITES = sum(1 << right for right in (1, *range(4, 15)))  # write_file, remove_*, make_*, refer, truncate


class TooLarge(Exception):
    """A folder that can be neither mounted copy-on-write nor copied."""


def system(name: str, *args) -> int:
    """Call a function of the C library."""
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


# Mounts


def mount(source, target, kind=None, flags: int = 0, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    system("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def set_read_only(place: Path, value: bool, flags: int = 0) -> None:
    attributes = struct.pack("4Q", READ_ONLY if value else 0, 0 if value else READ_ONLY, 0, 0)
    system("syscall", MOUNT_SETATTR, -1, os.fsencode(place), flags, attributes, len(attributes))


def new_namespace() -> None:
    """A mount namespace of this process's own; for whoever is not root, in a user namespace."""
    try:
        system("unshare", NEW_MOUNTS)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        system("unshare", NEW_MOUNTS | NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    mount(None, "/", flags=RECURSIVE | PRIVATE)


def opened(place: Path) -> str:
    """A path of what is at `place` now, also after something else is mounted there."""
    return f"/proc/self/fd/{os.open(place, os.O_PATH)}"


def mounts_in(folder: Path) -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if folder in place.parents:
            yield place


def copy_on_write(folders: list[Path], others: list[Path], output: Path, changes: str) -> None:
    """From now on this process sees `folders` copy-on-write at their own paths, and all else but `output` read-only.

    Args:
        folders: must be mounted; OSError where the system does not let us.
        others: are mounted where that is possible.
        changes: the name of a folder in `output`, for what is written. It may be that of an earlier run.
    """
    new_namespace()
    kept = opened(output)
    writable = [output]

    def overlay(lower: str, place: Path) -> None:
        layers = [f"{changes}/{len(writable)}/{layer}" for layer in ("upper", "work")]
        for layer in layers:
            (output / layer).mkdir(parents=True, exist_ok=True)
        upper, work = (f"{kept}/{layer}" for layer in layers)
        mount("overlay", place, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")
        mount(kept, output, flags=BIND)
        writable.append(place)

    for place in sorted({*folders, *others}):  # outer ones first
        if any(place.is_relative_to(other) for other in writable[1:]):
            continue
        inner = [(each, opened(each)) for each in mounts_in(place)]
        try:
            overlay(opened(place), place)
        except OSError:
            if place in folders:
                raise
            continue
        for each, lower in inner:
            try:
                overlay(lower, each)
            except OSError:
                mount(lower, each, flags=BIND | RECURSIVE)
    set_read_only(Path("/"), True, AT_RECURSIVE)
    for place in writable:
        set_read_only(place, False)
    mount("tmpfs", "/dev/shm", "tmpfs")


def home_and_temporary() -> list[Path]:
    found = [Path.home().resolve(), Path(tempfile.gettempdir()).resolve()]
    return [folder for folder in found if folder.is_dir() and folder != Path("/")]


def can_mount(folders: list[Path], scratch: Path) -> bool:
    """Try it, in a process that ends."""
    if not IS_LINUX or (pid := os.fork()):
        return IS_LINUX and os.waitpid(pid, 0)[1] == 0
    code = 1
    try:
        copy_on_write(folders, home_and_temporary(), scratch, "tried")
        code = 0
    except (OSError, AttributeError):
        pass
    finally:
        os._exit(code)


# Copies


def can_forbid_writes() -> bool:
    if not IS_LINUX:
        return False
    try:
        return system("syscall", LANDLOCK, None, 0, 1) >= LANDLOCK_TRUNCATE
    except OSError:
        return False


def forbid_writes(except_in: list[Path]) -> None:
    """From now on neither this process nor its children can change a file outside these folders."""
    rules = system("syscall", LANDLOCK, struct.pack("Q", WRITES), 8, 0)
    for folder in except_in:
        if folder.is_dir():
            rule = struct.pack("=Qi", WRITES, os.open(folder, os.O_PATH))
            system("syscall", LANDLOCK + 1, rules, 1, rule, 0)
    system("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system("syscall", LANDLOCK + 2, rules, 0)


def caches() -> list[Path]:
    """What libraries of data sets and models keep for later: a script may add to it, as any run of it does."""
    names = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")
    return [Path(os.environ[name]) for name in names if os.environ.get(name)] + [Path.home() / ".cache"]


def copy_folder(source: Path, target: Path, may_link: bool) -> None:
    """Copy what a script may read or write.

    Args:
        may_link: what is too large is a link; else TooLarge is raised.
    """
    left_bytes, left_files = COPIED_BYTES, COPIED_FILES

    def link(path: str, place: Path) -> None:
        if not may_link:
            raise TooLarge(path)
        place.symlink_to(Path(path).resolve())

    waiting = [(source, target)]
    while waiting:
        folder, copy = waiting.pop(0)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        left_files -= len(entries)
        if left_files < 0 and folder != source:
            link(folder, copy)
            continue
        copy.mkdir(parents=True)
        for entry in entries:
            place = copy / entry.name
            if entry.name in NOT_COPIED or target.is_relative_to(entry.path):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), place))
            elif entry.is_symlink() and is_inside(entry.path, source):
                place.symlink_to(os.readlink(entry.path))
            elif entry.is_file() and entry.stat().st_size <= left_bytes:
                left_bytes -= entry.stat().st_size
                shutil.copy2(entry.path, place)
            elif entry.is_file() or entry.is_dir():
                link(entry.path, place)


def is_inside(link: str, folder: Path) -> bool:
    return not os.path.isabs(os.readlink(link)) and Path(link).resolve().is_relative_to(folder)


# Before and after


def sizes_and_times(folders: list[Path], except_in: Path) -> dict[str, tuple[int, int]]:
    """The size and the time of the last change of each file."""
    found = {}
    for folder in folders:
        for place, folders_in_it, names in os.walk(folder):
            keep = [name for name in folders_in_it if name not in NOT_COPIED and Path(place, name) != except_in]
            folders_in_it[:] = keep
            for name in names:
                path = os.path.join(place, name)
                status = os.lstat(path) if os.path.lexists(path) else None
                found[path] = status and (status.st_size, status.st_mtime_ns)
            if len(found) > WATCHED_FILES:
                return found
    return found


# Processes


def adopt() -> None:
    """Become the parent of all processes that the children of this one leave behind, and end with its own parent."""
    if IS_LINUX:
        system("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)
        system("prctl", PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def end_children(known: list[int]) -> None:
    """End the sessions of these processes and, after `adopt`, all children and theirs."""
    for pid in known:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    while children := list(children_of(os.getpid())) if IS_LINUX else []:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children_of(pid: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                status = Path("/proc", name, "stat").read_text(errors="replace")
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                yield int(name)
