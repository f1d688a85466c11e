"""Lets a script write anywhere without changing any file of the user.

Where Linux allows mounts, the script runs at its own path in its own mount namespace: its folder, the home folder and
the temporary folder are copy-on-write (overlayfs copies only what is written), and everything else is read-only.
Elsewhere it runs in a copy; where Linux has Landlock, it cannot write outside the copy.
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
import traceback
from collections.abc import Iterator
from pathlib import Path

from .text import CannotTell

IS_LINUX = sys.platform == "linux"
COPIED_BYTES = 500_000_000  # total size of a copy
COPIED_FILES = 3_000
NOT_COPIED = {".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"}

# From the kernel's headers: sched.h, mount.h, prctl.h, landlock.h.
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
AT_RECURSIVE, READ_ONLY, MOUNT_SETATTR = 0x8000, 1, 442
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38
LANDLOCK, LANDLOCK_TRUNCATE = 444, 3  # the first of three system calls; the version that knows truncate()
WRITES = sum(1 << right for right in (1, *range(4, 15)))  # write_file, remove_*, make_*, refer, truncate


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
    """Give this process its own mount namespace, in a user namespace if it is not root."""
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
    """A path to what is at `place` now, valid even after something else is mounted there."""
    return f"/proc/self/fd/{os.open(place, os.O_PATH)}"


def mounts_in(folder: Path) -> Iterator[Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if folder in place.parents:
            yield place


def copy_on_write(folders: list[Path], output: Path, changes: str) -> None:
    """From now on, this process sees these folders, the home folder and the temporary folder copy-on-write, at their
    own paths, and everything else but `output` read-only.

    Args:
        changes: the name of a folder in `output` for what is written; it may be from an earlier run.

    Raises:
        OSError: if the system does not allow it.
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

    common = {Path.home().resolve(), Path(tempfile.gettempdir()).resolve()} - {Path("/")}
    for place in sorted({*folders, *filter(Path.is_dir, common)}):  # outer ones first
        if any(place.is_relative_to(other) for other in writable[1:]):
            continue
        inner = [(each, opened(each)) for each in mounts_in(place)]
        overlay(opened(place), place)
        for each, lower in inner:
            try:
                overlay(lower, each)
            except OSError:
                mount(lower, each, flags=BIND | RECURSIVE)
    set_read_only(Path("/"), True, AT_RECURSIVE)
    for place in writable:
        set_read_only(place, False)
    mount("tmpfs", "/dev/shm", "tmpfs")


def can_mount(folders: list[Path], scratch: Path) -> bool:
    """Try it, in a process that ends."""

    def attempt() -> int:
        try:
            copy_on_write(folders, scratch, "tried")
        except (OSError, AttributeError):
            return 1
        return 0

    return IS_LINUX and os.waitpid(forked(attempt), 0)[1] == 0


# Copies


def can_forbid_writes() -> bool:
    if not IS_LINUX:
        return False
    try:
        return system("syscall", LANDLOCK, None, 0, 1) >= LANDLOCK_TRUNCATE
    except OSError:
        return False


def forbid_writes(except_in: list[Path]) -> None:
    """From now on, neither this process nor its children can change files outside these folders."""
    rules = system("syscall", LANDLOCK, struct.pack("Q", WRITES), 8, 0)
    for folder in except_in:
        if folder.is_dir():
            rule = struct.pack("=Qi", WRITES, os.open(folder, os.O_PATH))
            system("syscall", LANDLOCK + 1, rules, 1, rule, 0)
    system("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system("syscall", LANDLOCK + 2, rules, 0)


def caches() -> list[Path]:
    """Caches of datasets and models. A script may add to them, as in any run."""
    names = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")
    return [Path(os.environ[name]) for name in names if os.environ.get(name)] + [Path.home() / ".cache"]


def copy_folder(source: Path, target: Path, may_link: bool) -> None:
    """Copy what a script may read or write, the upper folders first.

    Args:
        may_link: link to what is too large to copy.

    Raises:
        CannotTell: if it is too large and may not be linked.
    """
    left_bytes, left_files, waiting = COPIED_BYTES, COPIED_FILES, [(str(source), target)]
    while waiting:
        path, place = waiting.pop(0)
        is_link, is_folder = os.path.islink(path), os.path.isdir(path)
        if is_link and not os.path.isabs(os.readlink(path)) and Path(path).resolve().is_relative_to(source):
            place.symlink_to(os.readlink(path))
        elif is_folder and not is_link and (len(names := os.listdir(path)) <= left_files or path == str(source)):
            left_files -= len(names)
            place.mkdir(parents=True)
            entries = [(os.path.join(path, name), place / name) for name in sorted(names) if name not in NOT_COPIED]
            waiting += [entry for entry in entries if not target.is_relative_to(entry[0])]
        elif os.path.isfile(path) and os.path.getsize(path) <= left_bytes:
            left_bytes -= os.path.getsize(path)
            shutil.copy2(path, place)
        elif os.path.exists(path):
            if not may_link:
                raise CannotTell(f"{path} is too large to be copied, and cannot be mounted: move it elsewhere")
            place.symlink_to(os.path.realpath(path))


# Processes


def forked(function, *args) -> int:
    """Call a function in a new process; its result is the exit code. Returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 2
    try:
        code = function(*args)
    except SystemExit:
        pass
    except BaseException:  # the new process must not continue the work of its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def slowness() -> float:
    """By which factor other programs slow this machine down: processes that want to run, per processor."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def adopt() -> None:
    """Adopt processes that children leave behind, and end together with the parent process."""
    if IS_LINUX:
        system("prctl", CHILD_SUBREAPER, 1, 0, 0, 0)
        system("prctl", PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def end_children(known: list[int]) -> None:
    """Kill the sessions of these processes and, after `adopt`, all descendants."""
    for pid in known:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists() and (pids := children.read_text().split()):
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
