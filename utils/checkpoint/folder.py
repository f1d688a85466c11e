"""The folder of a run's checkpoints: write one so that it is whole or not there, and read one that is whole."""

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from ..atomic_files import fsync_file, fsync_folder, remove, write_synced
from ..console import show, stop
from .manifest import manifest_bytes, read_manifest

PROCESSES = "processes.safetensors"
# The file is lost. Other errors, such as missing rights, may be over at the next start.
LOST = {errno.ENOENT, errno.EIO}


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first, by number: as text 100000000 is below 99999999."""
    matches = (re.fullmatch(r"step_(\d{8,})", path.name) for path in folder.glob("step_*"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


# --- write ------------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path,
    manifest: dict,
    tensors: dict[str, dict[str, torch.Tensor]],
    sync: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint; the manifest goes last, and the folder gets its name when all in it is on the disk.

    Args:
        manifest: without its checksums.
        tensors: by file, in contiguous memory of their own.
        sync: called before the manifest is written, to flush what that speaks of.

    Raises:
        SystemExit: if it cannot be written.
    """
    step = manifest["step"]
    final = checkpoint_path(folder, step)
    part = folder / f".part_{final.name}"
    try:
        # Not its parents: a run whose folder was moved or removed must not go on in half of a new one.
        if not folder.is_dir():
            folder.mkdir()
            fsync_folder(folder.parent)
        remove(part)
        part.mkdir()
        digests = {name: write_tensors(part / name, content) for name, content in tensors.items()}
        if sync is not None:
            sync()
        write_synced(part / "manifest.json", manifest_bytes({**manifest, "sha256": digests}))
        fsync_folder(part)
        part.rename(final)
        fsync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove(part)
        left = complete_steps(folder)
        way_on = "there is none yet"
        if left:
            way_on = f"the one of step {left[0]} is whole, --resume goes on from it"
        if not folder.parent.is_dir():
            way_on = "the folder of the run was moved or removed"
        stop(f"the checkpoint of step {step} cannot be written to {folder} ({error.strerror}); {way_on}")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a file of safetensors through to the disk, without a copy in memory; returns its SHA-256 in hex.

    Args:
        tensors: contiguous, no two of them in the same memory.

    Raises:
        OSError: if it cannot be written.
    """
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    # For those who may read the folder: safetensors makes it for its owner alone.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_to_cpu(
    tensors: dict[str, torch.Tensor], copies: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Contiguous copies on the CPU, no two in the same memory, as `write_tensors` needs them.

    Args:
        copies: earlier copies, whose memory is used where it fits: new memory takes three times as
            long, because the system clears it first.
    """
    result = {}
    for name, tensor in tensors.items():
        copy = (copies or {}).get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        result[name] = copy.copy_(tensor.detach())
    return result


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; one that cannot be removed costs disk space only."""
    for step in complete_steps(folder)[keep:]:
        path = checkpoint_path(folder, step)
        part = path.with_name(f".part_{path.name}")
        try:
            # First its name, so that a kill in the middle leaves no half of a checkpoint.
            remove(part)
            path.rename(part)
            remove(part)
        except OSError as error:
            show(f"warning: {path} cannot be removed: {error.strerror or error}", "yellow")


# --- read -------------------------------------------------------------------------------------


def read_checkpoint(
    path: Path, check: Callable[[dict], None] | None = None
) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """The manifest of a checkpoint, and the tensors of each file.

    Args:
        check: called with the manifest before the tensors are read.

    Raises:
        ValueError: naming the file that is missing or damaged.
        OSError: if a file cannot be read for another reason: it may be whole.
        SystemExit: if it is of another version, or does not pass `check`.
    """
    name = "manifest.json"
    try:
        manifest = read_manifest(path)
        if check is not None:
            check(manifest)
        tensors = {}
        for name, digest in manifest["sha256"].items():
            content = (path / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise ValueError("its SHA-256 is not the one in manifest.json")
            tensors[name] = safetensors.torch.load(content)
    except OSError as error:
        if error.errno not in LOST:
            raise
        raise ValueError(f"{name}: {error.strerror}") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{name}: {error}") from error
    return manifest, tensors


def read_newest(folder: Path, check: Callable[[dict], None]) -> tuple[dict, dict[str, dict[str, torch.Tensor]]] | None:
    """`read_checkpoint` of the newest whole checkpoint in a folder; None if there is none at all.

    Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*.

    Raises:
        SystemExit: if none is whole though there are some, or if the newest cannot be read now.
    """
    for part in folder.glob(".part_*"):  # what a kill in the middle of a save left
        with contextlib.suppress(OSError):
            remove(part)
    steps, damaged = complete_steps(folder), []
    for step in steps:
        path = checkpoint_path(folder, step)
        try:
            manifest, tensors = read_checkpoint(path, check)
        except OSError as error:
            reason = f"{error.filename or path} cannot be read ({error.strerror})"
            stop(f"{reason}: nothing was changed, start again when it can")
        except ValueError as error:
            show(f"warning: {path} is skipped: {error}", "yellow")
            damaged.append(path)
            continue
        for other in damaged:  # its name will be needed again
            remove(other.with_name(f"damaged_{other.name}"))
            other.rename(other.with_name(f"damaged_{other.name}"))
        return manifest, tensors
    if steps:
        stop(f"none of the {len(steps)} checkpoints in {folder} is whole: start anew with another --output_dir")
    return None
