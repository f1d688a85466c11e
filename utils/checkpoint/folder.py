"""The folder of a run's checkpoints: write one so that it is whole or not there, and read one that is whole."""

import errno
import hashlib
import json
import re
import shutil
from pathlib import Path

import safetensors.torch
import torch

from ..atomic_files import fsync, write_atomically
from ..console import show, stop

FORMAT = 2
PROCESSES = "processes.safetensors"

Tensors = dict[str, torch.Tensor]
Files = dict[str, Tensors]


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by number: as text 100000000 is below 99999999."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def write_checkpoint(folder: Path, manifest: dict, files: Files, keep: int) -> None:
    """Write a checkpoint of files as from `copy_to_cpu`; then remove all but the newest `keep` (0: none).

    The manifest goes last, and the folder gets its name when all in it is on the disk.

    Raises: SystemExit, if it cannot be written.
    """
    final = folder / f"step_{manifest['step']:08d}"
    part = folder / f".part_{final.name}"
    try:
        # Not its parents: a run whose folder was moved must not go on in half of a new one.
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)
        part.mkdir()
        digests = {name: write_tensors(part / name, tensors) for name, tensors in files.items()}
        write_manifest(part / "manifest.json", {"format": FORMAT, **manifest, "sha256": digests})
        fsync(part)
        part.rename(final)
        fsync(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        stop(f"{final} cannot be written ({error.strerror}): --resume goes on from the checkpoint before it, if any")
    for path in newest_first(folder)[keep:] if keep else []:
        # First its name, so that a kill in the middle leaves no half of a checkpoint.
        shutil.rmtree(path.rename(folder / f".part_{path.name}"), ignore_errors=True)


def write_tensors(path: Path, tensors: Tensors) -> str:
    """Write a file of safetensors to the disk, without a copy in memory. Returns its SHA-256 in hex."""
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        raise OSError(errno.EIO, str(error).rpartition("I/O error: ")[2], str(path)) from error
    # Readable by those who may read the folder: safetensors makes it for its owner alone.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_model(path: Path, tensors: Tensors, copies: Tensors) -> None:
    """Write a file of safetensors that is whole or not there; `copies` as in `copy_to_cpu`."""
    write_atomically(path, lambda part: write_tensors(part, copy_to_cpu(tensors, copies)))


def write_manifest(path: Path, manifest: dict) -> None:
    path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1))
    fsync(path)


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def copy_to_cpu(tensors: Tensors, copies: Tensors) -> Tensors:
    """Contiguous copies on the CPU, no two in the same memory, as safetensors needs them.

    Reuses the memory of the earlier `copies`: new memory takes three times as long, because the system clears it. Where
    a tensor is on the meta device, the memory is left as it is. Memory for what is on a GPU is page-locked: all the
    copies are queued, and waited for once.
    """
    result = {}
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        result[name] = copy if tensor.is_meta else copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return result


def read_checkpoint(path: Path) -> tuple[dict, Files]:
    """The manifest and the tensors of a checkpoint, each file compared with its SHA-256.

    The tensors are mapped, not read: whatever outlives this checkpoint must copy them.

    Raises:
        ValueError: naming the file that is missing or damaged.
        OSError: if a file cannot be read for another reason, such as missing rights: it may be whole.
    """
    name, files = "manifest.json", {}
    try:
        manifest = json.loads((path / name).read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("checksum", None) != checksum(manifest):
            raise ValueError("its checksum differs")
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, and this version of the code reads {FORMAT}")
        if path.name != f"step_{manifest['step']:08d}":  # a copy: the run could not write the steps in between
            raise ValueError(f"it belongs to step {manifest['step']}")
        for name, digest in manifest["sha256"].items():
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise ValueError("its SHA-256 is not the one in manifest.json")
            files[name] = safetensors.torch.load_file(path / name)
    except Exception as error:  # of any type: the JSON may have any form
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ValueError(f"{name}: {error}") from error
    return manifest, files


def read_newest(folder: Path, files: Files) -> tuple[Path, dict] | None:
    """The path and manifest of the newest whole checkpoint, whose tensors go to `files`; None if there is none at all.

    Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*.
    """
    for part in folder.glob(".part_*"):  # what a kill in the middle of a save left
        shutil.rmtree(part, ignore_errors=True)
    paths = newest_first(folder)
    for number, path in enumerate(paths):
        try:
            manifest, tensors = read_checkpoint(path)
        except ValueError as error:
            show(f"warning: {path} is skipped: {error}", "yellow")
            continue
        for damaged in paths[:number]:  # the run will need its name again
            aside = folder / f"damaged_{damaged.name}"
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
        files.update(tensors)
        return path, manifest
    if paths:
        stop(f"none of the {len(paths)} checkpoints in {folder} is whole: start anew with another --output_dir")
    return None
