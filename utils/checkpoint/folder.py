"""The folder of a run's checkpoints: write one so that it is whole or not there, and read one that is whole."""

import errno
import hashlib
import itertools
import json
import re
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

FORMAT = 2
PROCESSES = "processes.safetensors"
RANK = r"\.rank_\d+(?=\.safetensors$)"  # in the name of a file of a rank other than 0

# In a file's header: the first row of each tensor, as torch.distributed.checkpoint's HuggingFaceStorageReader reads it.
ROWS = "DCP_SHARDING_INFO"

Tensors = dict[str, torch.Tensor]
Files = dict[str, Tensors]
Rows = dict[str, dict[str, int]]  # by file and tensor: the first row


class Stored:
    """A tensor of a checkpoint, mapped from one file; or if it was sharded, its rows from the files of several ranks.

    Args:
        parts: pairs of the first row, by which they are sorted, and a tensor.
    """

    def __init__(self, parts: list[tuple[int, torch.Tensor]]):
        self.starts, self.tensors = [first for first, _ in parts], [tensor for _, tensor in parts]
        self.dtype, shape = self.tensors[0].dtype, self.tensors[0].shape
        if self.starts != [0]:
            ends = [first + len(tensor) for first, tensor in parts]
            if self.starts != [0, *ends[:-1]]:
                raise ValueError(f"its parts begin at the rows {self.starts}, and end before {ends}")
            shape = torch.Size((ends[-1], *shape[1:]))
        self.shape = shape

    def whole(self) -> torch.Tensor:
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """The rows from `start` on, before `end`; only these are read."""
        parts = zip(self.starts, self.tensors, strict=True)
        return torch.cat([tensor[max(start - first, 0) : max(end - first, 0)] for first, tensor in parts])


StoredFiles = dict[str, dict[str, Stored]]


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by number: as text 100000000 is below 99999999."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


class Problem(Exception):
    """Why a checkpoint cannot be written: a sentence."""


class Board:
    """What the ranks' threads tell each other about one checkpoint, through the process group's store."""

    def __init__(self, name: str, timeout_s: float):
        self.name, self.timeout_s = name, timeout_s
        self.store = distributed.distributed_c10d._get_default_store()  # no public API

    def tell(self, rank: int, problem: str | None, digests: dict[str, str] | None = None) -> None:
        self.store.set(f"{self.name}/{rank}", json.dumps([problem, digests]))

    def hear(self, rank: int) -> dict[str, str]:
        """Wait for what `rank` tells. Raises: Problem: the one it has, or that the run has ended."""
        key, began = f"{self.name}/{rank}", time.monotonic()
        while not self.store.check([key]):
            if not threading.main_thread().is_alive() or time.monotonic() - began > self.timeout_s:
                raise Problem(f"rank {rank} has not written its part of the checkpoint")
            time.sleep(0.01)
        problem, digests = json.loads(self.store.get(key))
        if problem:
            raise Problem(problem)
        return digests


def write_checkpoint(
    path: Path, manifest: dict, files: Files, rows: Rows, keep: int, board: Board | None, ranks: Iterable[int]
) -> None:
    """Write a checkpoint of files as from `copy_to_cpu`; then remove all but the newest `keep` (0: none).

    The manifest goes last, when the other `ranks` have told that their files are on the disk too, and the folder gets
    its name when all in it is on the disk.

    Raises: OSError, Problem.
    """
    folder, part = path.parent, part_of(path)
    try:
        # Not its parents: a run whose folder was moved must not go on in half of a new one.
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)
        part.mkdir()
        if board is not None:
            board.tell(0, None)
        digests = write_files(part, files, rows)
        for rank in ranks:
            digests |= board.hear(rank)
        write_manifest(part / "manifest.json", {"format": FORMAT, **manifest, "sha256": digests})
        fsync(part)
        part.rename(path)
        fsync(folder)
    except (OSError, Problem):
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in newest_first(folder)[keep:] if keep else []:
        # First its name, so that a kill in the middle leaves no half of a checkpoint.
        shutil.rmtree(old.rename(part_of(old)), ignore_errors=True)


def write_part(path: Path, files: Files, rows: Rows, board: Board, rank: int) -> None:
    """Write this rank's files of the checkpoint `path`, and tell rank 0 their SHA-256. Raises: OSError, Problem."""
    board.hear(0)
    if not part_of(path).is_dir():
        raise Problem(f"{path.parent} is not the folder of rank 0: all machines of a sharded run need the same")
    board.tell(rank, None, write_files(part_of(path), files, rows))


def part_of(path: Path) -> Path:
    """The name of a checkpoint that is not yet whole, or no longer."""
    return path.with_name(f".part_{path.name}")


def write_files(folder: Path, files: Files, rows: Rows) -> dict[str, str]:
    """Write files as from `copy_to_cpu`; returns their SHA-256 by name."""
    digests = {}
    for name, tensors in files.items():
        header = header_of(tensors, rows.get(name))
        ordered = (tensors[key] for key in header if key in tensors)
        digests[name] = write_tensors(folder / name, header, ordered)
    return digests


def header_of(tensors: Tensors, rows: dict[str, int] | None = None) -> dict[str, dict]:
    """The header of a file of safetensors: what is in it, by name, in the order in which it is there.

    Args:
        rows: where the rows of each tensor begin in a tensor that several files share.
    """
    empty = safetensors.torch.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header, end = json.loads(empty[8:]), 0
    for name, entry in header.items():
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        entry |= {"shape": tensors[name].shape, "data_offsets": [begin, end]}
    if rows is None:
        return header
    offsets = {}
    for name, entry in header.items():
        dimensions = len(entry["shape"])
        offsets[name] = {"saved_offsets": [rows[name], *[0] * (dimensions - 1)] if dimensions else []}
    return {"__metadata__": {ROWS: json.dumps(offsets)}, **header}


def write_tensors(path: Path, header: dict[str, dict], tensors: Iterable[torch.Tensor]) -> str:
    """Write a file of safetensors to the disk. Returns its SHA-256 in hex.

    safetensors itself would need all tensors in memory, and a second pass over the file for its SHA-256.

    Args:
        tensors: in the order of the header; one after the other is needed.
    """
    digest, encoded = hashlib.sha256(), json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    try:
        with open(path, "wb") as file:
            for part in itertools.chain([len(encoded).to_bytes(8, "little"), encoded], map(bytes_of, tensors)):
                file.write(part)
                digest.update(part)
    except OSError as error:
        error.filename = str(path)
        raise
    fsync(path)
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()


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


def read_checkpoint(path: Path, share: slice = slice(None)) -> tuple[dict, StoredFiles]:
    """The manifest and the tensors of a checkpoint by file and name; those of several ranks' files are joined.

    The tensors are mapped, not read: whatever outlives this checkpoint must copy them.

    Args:
        share: which of its files, in the order of their names, to compare with their SHA-256.

    Raises:
        ValueError: naming the file that is missing or damaged.
        OSError: if a file cannot be read for another reason, such as missing rights: it may be whole.
    """
    name, parts = "manifest.json", {}
    try:
        manifest = json.loads((path / name).read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("checksum", None) != checksum(manifest):
            raise ValueError("its checksum differs")
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, and this version of the code reads {FORMAT}")
        if path.name != f"step_{manifest['step']:08d}":  # a copy: the run could not write the steps in between
            raise ValueError(f"it belongs to step {manifest['step']}")
        digests = sorted(manifest["sha256"].items())
        for name, digest in digests[share]:
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise ValueError("its SHA-256 is not the one in manifest.json")
        for name, _ in digests:
            with safetensors.safe_open(path / name, "pt") as file:
                offsets = json.loads((file.metadata() or {}).get(ROWS, "{}"))
            found = parts.setdefault(re.sub(RANK, "", name), {})
            for key, tensor in safetensors.torch.load_file(path / name).items():
                row = offsets[key]["saved_offsets"][:1] if offsets else []
                found.setdefault(key, []).append((sum(row), tensor))
        files = {}
        for name, found in parts.items():
            files[name] = {key: Stored(sorted(rows, key=lambda pair: pair[0])) for key, rows in found.items()}
    except Exception as error:  # of any type: the JSON may have any form
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ValueError(f"{name}: {error}") from error
    return manifest, files


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; what a kill in the middle of a save left is removed."""
    for part in folder.glob(".part_*"):
        shutil.rmtree(part, ignore_errors=True)
    return newest_first(folder)


def set_aside(paths: list[Path]) -> None:
    """Rename damaged checkpoints to damaged_step_*: the run will need their names again."""
    for path in paths:
        aside = path.with_name(f"damaged_{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
