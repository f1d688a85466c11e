"""The folder of a run's checkpoints: write one so that it is whole or not there, and read one that is whole."""

import contextlib
import errno
import hashlib
import json
import os
import re
from pathlib import Path

import safetensors.torch
import torch

from ..atomic_files import fsync_file, fsync_folder, remove, write_synced
from ..console import show, stop

FORMAT = 2
PROCESSES = "processes.safetensors"
# The file is lost. Other errors, such as missing rights, may be over at the next start.
LOST = {errno.ENOENT, errno.EIO}

Tensors = dict[str, dict[str, torch.Tensor]]  # by file and name


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first, by number: as text 100000000 is below 99999999."""
    matches = (re.fullmatch(r"step_(\d{8,})", path.name) for path in folder.glob("step_*"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


# --- write ------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, manifest: dict, tensors: Tensors) -> None:
    """Write a checkpoint; the manifest goes last, and the folder gets its name when all in it is on the disk.

    Args:
        tensors: as from `copy_to_cpu`.
    """
    final = checkpoint_path(folder, manifest["step"])
    part = folder / f".part_{final.name}"
    try:
        # Not its parents: a run whose folder was moved or removed must not go on in half of a new one.
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)
        remove(part)
        part.mkdir()
        digests = {name: write_tensors(part / name, content) for name, content in tensors.items()}
        write_synced(part / "manifest.json", manifest_bytes({**manifest, "sha256": digests}))
        fsync_folder(part)
        part.rename(final)
        fsync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            remove(part)
        stop(f"{final} cannot be written ({error.strerror}): --resume goes on from the checkpoint before it, if any")


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a file of safetensors through to the disk, without a copy in memory; returns its SHA-256 in hex."""
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


def copy_to_cpu(tensors: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies on the CPU, no two in the same memory, as safetensors needs them.

    Args:
        copies: earlier copies, whose memory is used where it fits: new memory takes three times as
            long, because the system clears it first.
    """
    result = {}
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        result[name] = copy.copy_(tensor.detach())
    return result


def manifest_bytes(manifest: dict) -> bytes:
    """The content of manifest.json: `manifest`, and its checksum."""
    return json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1).encode()


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; one that cannot be removed costs disk space only."""
    for step in complete_steps(folder)[keep:]:
        path = checkpoint_path(folder, step)
        part = folder / f".part_{path.name}"
        try:
            # First its name, so that a kill in the middle leaves no half of a checkpoint.
            remove(part)
            path.rename(part)
            remove(part)
        except OSError as error:
            show(f"warning: {path} cannot be removed: {error.strerror or error}", "yellow")


# --- read -------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> tuple[dict, Tensors]:
    """The manifest and the tensors of a checkpoint, each file compared with its SHA-256.

    Raises:
        ValueError: naming the file that is missing or damaged.
        OSError: if a file cannot be read for another reason: it may be whole.
        SystemExit: if it is of another version.
    """
    name = "manifest.json"
    try:
        manifest = read_manifest(path)
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


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint in the folder `path`; raises as `read_checkpoint` does."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest.pop("checksum", None) != checksum(manifest):
        raise ValueError("its checksum differs")
    if manifest["format"] != FORMAT:
        stop(
            f"{path} was written by another version of this code (format {manifest['format']}, this one reads "
            f"{FORMAT}): end that run with its own version, or start anew with another --output_dir"
        )
    return manifest


def read_newest(folder: Path) -> tuple[dict, Tensors] | None:
    """`read_checkpoint` of the newest whole checkpoint in a folder; None if there is none at all.

    Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*.
    """
    for part in folder.glob(".part_*"):  # what a kill in the middle of a save left
        with contextlib.suppress(OSError):
            remove(part)
    paths = [checkpoint_path(folder, step) for step in complete_steps(folder)]
    for number, path in enumerate(paths):
        try:
            manifest, tensors = read_checkpoint(path)
        except ValueError as error:
            show(f"warning: {path} is skipped: {error}", "yellow")
            continue
        for damaged in paths[:number]:  # its name will be needed again
            aside = folder / f"damaged_{damaged.name}"
            remove(aside)
            damaged.rename(aside)
        return manifest, tensors
    if paths:
        stop(f"none of the {len(paths)} checkpoints in {folder} is whole: start anew with another --output_dir")
    return None
