"""The folder of a run's checkpoints: write one so that it is whole or not there."""

import hashlib
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import distributed

from ..atomic_files import fsync

FORMAT = 5
NEED_ONE_FOLDER = (
    "all machines need to see one --output_dir to resume a run, or to shard or split a model (to resume a run of whole "
    "models, a copy of it on each machine will do)"
)
RANK = r"\.rank_\d+(?=\.safetensors$)"  # in the name of a file of a rank other than 0

Tensors = dict[str, torch.Tensor]
Files = dict[str, Tensors]


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step_" + "[0-9]" * 8), reverse=True)


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint; deletes what an interrupted save left behind."""
    for part in folder.glob(".part_*"):
        shutil.rmtree(part, ignore_errors=True)
    return bool(newest_first(folder))


class CheckpointError(Exception):
    """The checkpoint cannot be written. The message says why; it is empty if the run is ending for another reason."""


class SaveMessages:
    """Messages between the saving threads of all ranks about one checkpoint, through the process group's store.

    Args:
        ranks: those, besides rank 0, that write files.
    """

    def __init__(self, name: str, ranks: list[int], timeout_s: float):
        self.name, self.ranks, self.timeout_s = name, ranks, timeout_s
        self.store = distributed.distributed_c10d._get_default_store()  # no public API

    def post(self, rank: int, problem: str | None, digests: dict[str, str] | None = None) -> None:
        self.store.set(f"{self.name}/{rank}", json.dumps([problem, digests]))

    def wait(self, rank: int) -> dict[str, str]:
        """Wait for the message of `rank` and return its digests.

        Raises:
            CheckpointError: the one that `rank` posted, that it posted nothing in time, or that this process is ending.
        """
        key, began = f"{self.name}/{rank}", time.monotonic()
        while not self.store.check([key]):
            if not threading.main_thread().is_alive():
                raise CheckpointError
            if time.monotonic() - began > self.timeout_s:
                raise CheckpointError(f"rank {rank} has not written its part of the checkpoint")
            time.sleep(0.01)
        problem, digests = json.loads(self.store.get(key))
        if problem is not None:
            raise CheckpointError(problem)
        return digests


def write_checkpoint(path: Path, manifest: dict, files: Files, keep: int, messages: SaveMessages | None) -> None:
    """Write this rank's `files`, copied to the CPU, as a checkpoint; then delete all but the newest `keep` checkpoints.

    The manifest is written last, after all ranks report that their files are on disk; only then is the folder renamed
    to its final name.

    Args:
        keep: 0 keeps all.
        messages: None: no other rank writes files.

    Raises:
        OSError, CheckpointError: it could not be written, and no part of it is left.
    """
    folder, part = path.parent, temporary_path(path)
    try:
        # Not its parents: a run whose folder was moved must not go on in half of a new one.
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)
        part.mkdir()
        if messages is not None:
            messages.post(0, None)
        digests = write_files(part, files)
        for rank in messages.ranks if messages else ():
            digests |= messages.wait(rank)
        write_manifest(part / "manifest.json", {"format": FORMAT, **manifest, "sha256": digests})
        fsync(part)
        part.rename(path)
        fsync(folder)
    except (OSError, CheckpointError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in newest_first(folder)[keep:] if keep else []:
        # Renamed first, so that a kill in the middle does not leave half a checkpoint under this name.
        shutil.rmtree(old.rename(temporary_path(old)), ignore_errors=True)


def write_rank_files(path: Path, files: Files, messages: SaveMessages, rank: int) -> None:
    """Write this rank's files of the checkpoint `path`, and send rank 0 their SHA-256.

    Raises:
        OSError, CheckpointError: they could not be written.
    """
    messages.wait(0)
    if not temporary_path(path).is_dir():
        raise CheckpointError(f"{path.parent} is not the folder of rank 0: {NEED_ONE_FOLDER}")
    messages.post(rank, None, write_files(temporary_path(path), files))


def temporary_path(path: Path) -> Path:
    """The name of a checkpoint that is being written or deleted."""
    return path.with_name(f".part_{path.name}")


def write_files(folder: Path, files: Files) -> dict[str, str]:
    """Write files of tensors on the CPU; returns their SHA-256 by name."""
    digests = {}
    for name, tensors in files.items():
        header = make_header(tensors)
        digests[name] = write_tensors(folder / name, header, map(tensors.get, header))
    return digests


def make_header(tensors: Tensors) -> dict[str, dict]:
    """The header of a safetensors file: dtype, shape and position of each tensor, in the order of the file."""
    empty = safetensors.torch.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header, end = json.loads(empty[8:]), 0
    for name, entry in header.items():
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        entry |= {"shape": tensors[name].shape, "data_offsets": [begin, end]}
    return header


def write_tensors(path: Path, header: dict[str, dict], tensors: Iterable[torch.Tensor]) -> str:
    """Write a safetensors file and flush it to the disk. Returns its SHA-256 in hex.

    The safetensors library would need all tensors in memory at once, and a second pass over the file for the SHA-256.

    Args:
        tensors: in the order of the header; taken one at a time.
    """
    digest, encoded = hashlib.sha256(), json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with open(path, "wb") as file:
            for part in itertools.chain([len(encoded).to_bytes(8, "little"), encoded], map(view_bytes, tensors)):
                file.write(part)
                digest.update(part)
    except OSError as error:
        error.filename = str(path)
        raise
    fsync(path)
    return digest.hexdigest()


def view_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()


def write_manifest(path: Path, manifest: dict) -> None:
    path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1))
    fsync(path)


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def copy_to_cpu(tensors: Tensors, copies: Tensors) -> Tensors:
    """Contiguous copies on the CPU that share no memory, as safetensors needs them.

    Reuses the memory of the earlier `copies`: new memory takes three times as long, because the system clears it.
    Copies of GPU tensors are page-locked, so that all of them can be queued and waited for once.
    """
    result = {}
    for name, tensor in tensors.items():
        copy = copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        result[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return result
