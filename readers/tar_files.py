"""Samples in tar files, as webdataset lays them out, read from their place: any one of them, in any order."""

import bisect
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from utils.atomic_files import write_atomically
from utils.console import plural, show, stop
from utils.failures.signals import obey_only_parent
from utils.fingerprint import digest
from utils.items import UnreadableItem, stop_at_unreadable_items
from utils.launched import share_of_cores

from .cache import build_cached, cache_folder, file_signature, read_intact
from .files import announce, list_files, split_files, stop_if_unreadable
from .images_in_memory import MOST_CLASSES, Split, check_labels

FORMAT = 2  # of the files in the cache
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff", "avif", "jp2", "mpo")
LABELS = ("cls", "json", "txt")  # the first of these that a sample has
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
CLASSES = ("classes.txt", "classnames.txt")
OPEN_FILES = 128  # at a time in one process


class TarFiles(Dataset):
    """A map-style dataset of the samples in tar files: the members `KEY.EXTENSION` with one key are one sample.

    The key ends at the first dot of the file's name, and includes its folders. Each tar file is scanned once; the
    offsets of its members are cached. A sample is then read with `pread`.

    Args:
        paths: tar files that are not compressed. Their samples are the items, in this order.
        decode: function of the sample, {"__url__": file, "__key__": str, "jpg": bytes, ...} by extension in lower
            case. A ValueError, OSError or KeyError ends the run with the name of the sample. None: items are samples.
        extensions: read only these, and those that end with one, such as "input.jpg"; None: all.
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
        self.signatures = list(map(file_signature, self.paths))
        self.members = for_each(self.paths, members_of, cache_dir)
        # Of each file, the row of each sample's first member; of all files, the number of samples up to their end.
        self.starts = [np.flatnonzero(np.diff(rows["sample"], prepend=-1, append=-1)) for rows in self.members]
        self.ends = list(itertools.accumulate(len(starts) - 1 if len(starts) else 0 for starts in self.starts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int):
        index = range(len(self))[index]
        number = bisect.bisect_right(self.ends, index)
        sample = index - (self.ends[number - 1] if number else 0)
        first, last = self.starts[number][sample : sample + 2]
        rows = self.members[number][first:last].tolist()
        key, _ = split_name(rows[0][0])
        content = {"__url__": str(self.paths[number]), "__key__": key}
        try:
            file = open_unchanged(*self.signatures[number])
            for name, offset, size, _ in rows:
                _, extension = split_name(name)
                if self.extensions is None or {extension, extension.rpartition(".")[2]} & self.extensions:
                    content[extension] = os.pread(file.fileno(), size, offset)
                    if len(content[extension]) != size:
                        raise ValueError("the file has become shorter during the run")
            return content if self.decode is None else self.decode(content)
        except (ValueError, OSError, KeyError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise UnreadableItem(f"{self.paths[number]}: {key}: {type(error).__name__}: {reason}") from error

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the names of the files and of all members, and their sizes."""
        sha = hashlib.sha256()
        for path, rows in zip(self.paths, self.members, strict=True):
            sha.update(f"{path.name}\n".encode() + rows["name"].tobytes() + rows["size"].tobytes())
        return sha.hexdigest()[:16]


@functools.lru_cache(OPEN_FILES)
def open_unchanged(path: str, size: int, mtime_ns: int):
    """The open file. Raises: ValueError, if it is not the one that was scanned."""
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


def for_each(paths: list[Path], make: Callable[..., np.ndarray], cache_dir: str | None, *args) -> list[np.ndarray]:
    """The arrays `make(path, *args)`, from files in the cache; missing or damaged ones are made in parallel."""
    folder, name = cache_folder(cache_dir, "tar"), getattr(make, "func", make).__name__
    files = [folder / f"{digest([FORMAT, name, args, *file_signature(path)])}.npz" for path in paths]

    def build() -> None:
        tables = dict(zip(files, paths, strict=True))  # a file may come twice, by a link
        missing = [file for file in tables if read_intact(functools.partial(read, file), folder, "a table") is None]
        show(f"scanning {plural(len(missing), 'tar file')} beside {tables[missing[0]]}, once")
        workers = min(len(missing), share_of_cores() * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        fork = multiprocessing.get_context("fork")
        with stop_at_unreadable_items(), ProcessPoolExecutor(workers, fork, obey_only_parent) as processes:
            [*processes.map(functools.partial(save, make, args), missing, map(tables.get, missing))]

    return build_cached(lambda: list(map(read, files)), build, folder, "the tables of tar files")


def read(file: Path) -> np.ndarray:
    with np.load(file) as content:  # a zip file, with a checksum
        return content["rows"]


def save(make: Callable[..., np.ndarray], args: tuple, file: Path, path: Path) -> None:
    rows = make(path, *args)
    write_atomically(file, lambda part: np.savez(part, rows=rows))


def members_of(path: Path) -> np.ndarray:
    """The members of a tar file: name, offset, size, and number of the sample, in whose order they are.

    As in webdataset, files without an extension, or whose name begins with a dot, are passed over.

    Raises:
        UnreadableItem: if it is not a whole tar file, or two members have one name.
    """
    rows, samples, names, passed_over = [], {}, set(), []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members.clear()  # it would keep all of them
                if member.issparse():
                    raise ValueError(f"{member.name} is sparse")
                key, extension = split_name(name := member.name.encode(errors="surrogateescape"))
                if not member.isfile() or not extension or not key.rpartition("/")[2]:
                    passed_over += [] if member.isdir() else [member.name]
                elif (key, extension) in names:
                    raise ValueError(f"two members are named {key}.{extension}")
                else:
                    names.add((key, extension))
                    rows.append((name, member.offset_data, member.size, samples.setdefault(key, len(samples))))
            end = tar.offset
        with open(path, "rb") as file:
            file.seek(end)
            if (rest := file.read(2**20)).strip(b"\0"):
                raise ValueError(f"another archive begins at byte {end}")
            if not rest:
                raise ValueError("it ends without the blocks that end an archive, and may have been cut off")
    except (ValueError, tarfile.TarError, OSError) as error:
        after = f", after {rows[-1][0].decode(errors='replace')}" if rows else ""
        raise UnreadableItem(
            f"{path} is not a whole, uncompressed tar file ({getattr(error, 'strerror', None) or error}{after})"
        ) from error
    if passed_over:
        show(f"{path}: {plural(len(passed_over), 'member')} without an extension left out, such as {passed_over[0]}")
    rows.sort(key=lambda row: row[3])
    longest = max((len(name) for name, *_ in rows), default=1)
    return np.array(rows, [("name", f"S{longest}"), ("offset", "i8"), ("size", "i8"), ("sample", "i8")])


# Images with labels


def has_tar_files(dataset: str) -> bool:
    """Whether a folder has tar files, or its folders have."""
    return any(name.lower().endswith((".tar", *PACKED)) for name in list_files(dataset)[0])


def load_tar_splits(
    dataset: str, cache_dir: str | None, image_column: str | None = None, label_column: str | None = None
) -> tuple[Split, Split]:
    """The train and test split of a folder of tar files, which their names say (see `split_files`).

    A sample is an image and its label: the text of a `.cls` or `.txt`, or the entry `label` of a `.json`. A label is a
    number, or a name in CLASSES, a file beside the tar files with one name per line.

    Args:
        image_column: an extension, where a sample has several images.
        label_column: an extension, or an entry of the `.json`.
    """
    files, left_out = list_files(dataset)
    classes_file = next((files.pop(name) for name in CLASSES if name in files), os.devnull)
    with stop_if_unreadable(classes_file):
        lines = Path(classes_file).read_text(encoding="utf-8").split("\n")
    classes = [line.strip() for line in lines if line.strip()]
    for name in files:
        if name.lower().endswith(PACKED):
            stop(f"--dataset {dataset}: {name} is compressed, but must be read at any place: unpack it to a .tar")
        if not name.lower().endswith(".tar"):
            stop(f"--dataset {dataset} has tar files, and {name}, which is not one: remove it")
    splits, others = split_files(dataset, files)
    if "test" not in splits:
        stop(f"--dataset {dataset} has no tar files for testing: name them by split, such as train-0.tar, val-0.tar")

    found, read_labels = [], functools.partial(labels_of, cache_dir)
    for name in ("train", "test"):
        paths, extensions = list(splits[name].values()), (image_column,) if image_column else IMAGES
        rows = TarFiles(paths, functools.partial(as_cell, image_column), extensions=extensions, cache_dir=cache_dir)
        if not len(rows):
            stop(f"--dataset {dataset} has no samples in {paths[0]}{' and others' * (len(paths) > 1)}")
        labels = torch.from_numpy(np.concatenate(for_each(paths, read_labels, cache_dir, label_column, classes)))
        found.append((rows, labels))
    classes = check_labels(dataset, torch.cat([labels for _, labels in found]), classes or None)
    numbers = [f"{len(rows):,} images in {plural(len(rows.paths), 'tar file')}" for rows, _ in found]
    used = f"{numbers[0]} for training, {numbers[1]} for testing, {plural(len(classes), 'class')}"
    announce(dataset, used, [*left_out, *others])
    return tuple(Split(dataset, rows, "image", labels, classes) for rows, labels in found)


def as_cell(image_column: str | None, sample: dict) -> dict:
    """The sample as a row of `datasets` with an image that is not decoded."""
    names = [name for name in sample if not name.startswith("__")]
    images = [name for name in names if name in IMAGES and not image_column] or names
    if len(images) != 1:
        raise ValueError(f"it has {plural(len(images), 'image')} ({', '.join(images)}): see --image_column")
    path = f"{sample['__url__']}: {sample['__key__']}.{images[0]}"
    return {"image": {"bytes": sample[images[0]], "path": path}}


def labels_of(cache_dir: str | None, path: Path, label_column: str | None, classes: list[str]) -> np.ndarray:
    decode, extensions = functools.partial(label_of, label_column, classes), {*LABELS, label_column or "cls"}
    return np.array([*TarFiles([path], decode, extensions=extensions, cache_dir=cache_dir)], np.int64)


def label_of(label_column: str | None, classes: list[str], sample: dict) -> int:
    names = [name for last in (label_column, *LABELS) for name in sample if last and f".{name}".endswith(f".{last}")]
    if not names:
        raise ValueError(f"it has no label: none of .{', .'.join(LABELS)}")
    label = sample[names[0]].decode().strip()
    if names[0].endswith("json"):
        entries = json.loads(label)
        label = entries[label_column or "label"] if isinstance(entries, dict) else entries
    if label in classes:
        return classes.index(label)
    if isinstance(label, float | bool) or not str(label).isdecimal() or int(label) >= MOST_CLASSES:
        raise ValueError(f"its label is {label!r}, but labels are numbers from 0, or names in {' or '.join(CLASSES)}")
    return int(label)
