"""Samples in tar files, as webdataset lays them out, read from their place: any one of them, in any order."""

import bisect
import collections
import functools
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.atomic_files import write_atomically
from utils.console import plural, show, stop
from utils.fingerprint import digest
from utils.items import UnreadableItem, stop_at_unreadable_items
from utils.signals import obey_only_parent
from utils.topology import share_of_cores

from .cache import cache_folder, identity, make_once
from .hub import TEST_SPLITS
from .images_in_memory import Split

FORMAT = 1  # of the files in the cache
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "tif", "tiff")
OPEN_FILES = 128  # at a time in one process


class TarFiles(Dataset):
    """A map-style dataset of the samples in tar files: the members `KEY.EXTENSION` with one key are one sample.

    The key ends at the first dot of the file's name, and includes its folders. Each tar file is looked through once,
    and the places of its members are kept in the cache; a sample is then read with `pread`.

    Args:
        paths: tar files that are not compressed. Their samples are the items, in this order.
        decode: function of the sample, {"__url__": file, "__key__": str, "jpg": bytes, ...} by extension in lower
            case. A ValueError, OSError or KeyError ends the run with the name of the sample. None: items are samples.
        extensions: read only these; None: all.
        cache_dir: None: beside the cache of Hugging Face.
    """

    def __init__(
        self,
        paths: Iterable[Path | str],
        decode: Callable | None = None,
        *,
        extensions: Iterable[str] | None = None,
        cache_dir: str | None = None,
    ):
        self.paths, self.decode, self.extensions = list(map(Path, paths)), decode, extensions and {*extensions}
        files = for_each(self.paths, places_of, cache_dir)
        self.identities = list(map(identity, self.paths))
        self.places = [np.load(file, mmap_mode="r") for file in files]  # not in memory: a row for each member
        self.ends = list(itertools.accumulate(int(rows["sample"][-1]) + 1 if len(rows) else 0 for rows in self.places))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int):
        index = range(len(self))[index]
        number = bisect.bisect_right(self.ends, index)
        rows, sample = self.places[number], index - (self.ends[number - 1] if number else 0)
        rows = rows[slice(*np.searchsorted(rows["sample"], [sample, sample + 1]))].tolist()
        key, _ = split_name(rows[0][0])
        content = {"__url__": str(self.paths[number]), "__key__": key}
        try:
            file = open_unchanged(*self.identities[number])
            for name, offset, size, _ in rows:
                _, extension = split_name(name)
                if self.extensions is None or extension in self.extensions:
                    content[extension] = os.pread(file.fileno(), size, offset)
            return content if self.decode is None else self.decode(content)
        except (ValueError, OSError, KeyError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UnreadableItem(f"{self.paths[number]}: {key}: {type(error).__name__}: {reason}") from error

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the names of the files and of all members, and their sizes."""
        sha = hashlib.sha256()
        for path, rows in zip(self.paths, self.places, strict=True):
            sha.update(f"{path.name}\n".encode() + rows["name"].tobytes() + rows["size"].tobytes())
        return sha.hexdigest()[:16]


@functools.lru_cache(OPEN_FILES)
def open_unchanged(path: str, size: int, mtime_ns: int):
    """The open file. Raises: ValueError, if it is not the one that was looked through."""
    file = open(path, "rb")  # noqa: SIM115  stays open
    about = os.fstat(file.fileno())
    if (about.st_size, about.st_mtime_ns) != (size, mtime_ns):
        raise ValueError("the file has changed during the run")
    return file


def split_name(name: bytes) -> tuple[str, str]:
    """The key and the extension of a member: "dogs/1.seg.PNG" gives "dogs/1" and "seg.png"."""
    folder, slash, file = name.decode(errors="surrogateescape").rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


# Made once per file, and kept in the cache


def for_each(paths: list[Path], make: Callable[[Path], np.ndarray], cache_dir: str | None) -> list[Path]:
    """The cached files with the array of `make(path)`; those that are missing are made in parallel."""
    folder, name = cache_folder(cache_dir, "tar"), getattr(make, "func", make).__name__
    files = [folder / f"{digest([FORMAT, name, *identity(path)])}.npy" for path in paths]

    def make_missing() -> None:
        missing = [pair for pair in zip(paths, files, strict=True) if not pair[1].exists()]
        show(f"looking through {plural(len(missing), 'tar file')} beside {missing[0][0]}, once")
        workers = min(len(missing), share_of_cores() * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        fork = multiprocessing.get_context("fork")
        with stop_at_unreadable_items(), ProcessPoolExecutor(workers, fork, obey_only_parent) as processes:
            [*processes.map(functools.partial(save, make), *zip(*missing, strict=True))]

    make_once(files, make_missing, "the tables of tar files")
    return files


def save(make: Callable[[Path], np.ndarray], path: Path, file: Path) -> None:
    with io.BytesIO() as content:
        np.save(content, make(path))
        write_atomically(file, lambda part: part.write_bytes(content.getbuffer()))


def places_of(path: Path) -> np.ndarray:
    """The members of a tar file: name, offset, size, and number of the sample, in whose order they are.

    Raises:
        UnreadableItem: if it is not a whole tar file, or two members have one name.
    """
    rows, samples = [], {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # it would keep all of them
                if member.issparse():
                    raise ValueError(f"{member.name} is sparse")
                if member.isfile():
                    name = member.name.encode(errors="surrogateescape")
                    number = samples.setdefault(split_name(name)[0], len(samples))
                    rows.append((name, member.offset_data, member.size, number))
            end = tar.offset
        with open(path, "rb") as file:
            file.seek(end)
            if not (rest := file.read(2**20)) or rest.strip(b"\0"):
                raise ValueError(f"its archive ends at byte {end}, and the file does not")
    except (ValueError, tarfile.TarError, OSError) as error:
        after = f", after {rows[-1][0].decode(errors='replace')}" if rows else ""
        raise UnreadableItem(
            f"{path} is not a whole, uncompressed tar file ({getattr(error, 'strerror', None) or error}{after})"
        ) from error
    rows.sort(key=lambda row: row[3])
    counts = collections.Counter(name.lower() for name, *_ in rows)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise UnreadableItem(f"{path} has two members {twice.decode(errors='replace')}")
    longest = max((len(name) for name, *_ in rows), default=1)
    return np.array(rows, [("name", f"S{longest}"), ("offset", "i8"), ("size", "i8"), ("sample", "i8")])


# Images with labels


def has_tar_files(dataset: str) -> bool:
    """Whether a folder has tar files, or its folders have."""
    return any(glob.glob(f"{glob.escape(dataset)}/{pattern}") for pattern in ("*.tar", "*/*.tar"))


def load_tar_splits(dataset: str, cache_dir: str | None) -> tuple[Split, Split]:
    """The train and test split of a folder of tar files whose paths have the words train and test, validation or val.

    A sample is an image and its label, which is a number: the text of a `.cls`, or the entry `label` of a `.json`.
    """
    paths = sorted(Path(dataset).rglob("*.tar"))
    splits = {name: [] for name in ("train", *TEST_SPLITS)}
    for path in paths:
        words = re.split("[^a-z]+", str(path.relative_to(dataset)).lower())
        name = next((name for name in splits if name in words), None)
        if name is None:
            stop(f"--dataset {dataset}: {path} has none of the words {', '.join(splits)} in its name or folder")
        splits[name].append(path)
    test = next((name for name in TEST_SPLITS if splits[name]), None)
    if not splits["train"] or test is None:
        stop(f"--dataset {dataset} has no tar files for {'testing' if splits['train'] else 'training'}")

    found, read_labels = [], functools.partial(labels_of, cache_dir)
    for name in ("train", test):
        rows = TarFiles(splits[name], as_cell, extensions=IMAGES, cache_dir=cache_dir)
        labels = np.concatenate([np.load(file) for file in for_each(splits[name], read_labels, cache_dir)])
        found.append((rows, torch.from_numpy(labels)))
    classes = [str(label) for label in range(int(max(labels.max() for _, labels in found)) + 1)]
    return tuple(Split(dataset, rows, "image", labels, classes) for rows, labels in found)


def as_cell(sample: dict) -> dict:
    """The sample as a row of `datasets` with an image that is not decoded."""
    extension = next((extension for extension in IMAGES if extension in sample), None)
    if extension is None:
        raise ValueError(f"it has no image: none of {', '.join(IMAGES)}")
    path = f"{sample['__url__']}: {sample['__key__']}.{extension}"
    return {"image": {"bytes": sample[extension], "path": path}}


def labels_of(cache_dir: str | None, path: Path) -> np.ndarray:
    return np.array([*TarFiles([path], label_of, extensions=("cls", "json"), cache_dir=cache_dir)], np.int64)


def label_of(sample: dict) -> int:
    if "cls" not in sample and "json" not in sample:
        raise ValueError("it has neither .cls nor .json")
    label = int(sample["cls"]) if "cls" in sample else json.loads(sample["json"])["label"]
    if not isinstance(label, int) or label < 0:
        raise ValueError(f"its label is {label!r}, but labels are numbers from 0")
    return label
