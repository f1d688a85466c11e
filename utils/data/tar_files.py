"""Samples in tar files, as webdataset lays them out, read from their place: any one of them, in any order."""

import functools
import hashlib
import json
import multiprocessing
import os
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from ..console import plural, show, stop
from ..fingerprint import digest
from ..items import UnreadableItem, obey_only_parent, stop_at_unreadable_items
from ..launched import share_of_cores
from .cache import build_once, cache_folder, file_signature
from .files import stop_if_unreadable

FORMAT = 4  # of the files in the cache
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff", "avif", "jp2", "mpo")
LABELS = ("cls", "json", "txt")  # the first of these that a sample has


class TarFiles(Dataset):
    """A map-style dataset of the samples in tar files: the members `KEY.EXTENSION` with one key are one sample.

    The key ends at the first dot of the file's name, and includes its folders. The files are scanned once.

    Args:
        paths: tar files that are not compressed. Their samples are the items, in this order.
        decode: function of the sample, {"__url__": file, "__key__": str, "jpg": bytes, ...} by extension in lower
            case. A ValueError, OSError or KeyError ends the run with the name of the sample. None: items are samples.
        extensions: read only these, and those that end with one, such as "input.jpg"; None: all.
    """

    def __init__(self, paths: Iterable[Path | str], decode: Callable | None = None, *, extensions=None, cache_dir=None):
        self.paths, self.decode, self.extensions = list(map(Path, paths)), decode, extensions and {*extensions}
        self.signatures = list(map(file_signature, self.paths))
        self.folder = cache_folder(cache_dir, "tar") / digest([FORMAT, self.signatures])
        build_once(self.folder, self._scan)
        self.members = np.load(self.folder / "members.npy")
        # The row of each sample's first member, and the number of rows.
        self.starts = np.flatnonzero(np.diff(self.members["sample"], prepend=-1, append=-1))

    def _scan(self) -> None:
        show(f"scanning {plural(len(self.paths), 'tar file')} beside {self.paths[0]}, once")
        workers = min(len(self.paths), share_of_cores() * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        fork = multiprocessing.get_context("fork")
        with stop_at_unreadable_items(), ProcessPoolExecutor(workers, fork, obey_only_parent) as processes:
            tables, first = [*processes.map(members_of, self.paths)], 0
        for number, table in enumerate(tables):
            table["file"] = number
            table["sample"] += first
            first = table["sample"].max(initial=first - 1) + 1
        np.save(self.folder / "members.npy", np.concatenate(tables))

    def __len__(self) -> int:
        return max(len(self.starts) - 1, 0)

    def __getitem__(self, index: int):
        index = range(len(self))[index]
        rows = self.members[self.starts[index] : self.starts[index + 1]].tolist()
        name, number, *_ = rows[0]
        content = {"__url__": str(self.paths[number]), "__key__": (key := split_name(name)[0])}
        try:
            file = open_unchanged(*self.signatures[number])
            for name, _, offset, size, _ in rows:
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
        sha = hashlib.sha256("\n".join(path.name for path in self.paths).encode())
        for column in ("name", "size"):
            sha.update(self.members[column].tobytes())
        return sha.hexdigest()[:16]


@functools.lru_cache(128)  # files that are open at a time in one process
def open_unchanged(path: str, size: int, mtime_ns: int):
    """The open file. Raises: ValueError, if it is not the one that was scanned."""
    file = open(path, "rb")  # noqa: SIM115  stays open
    if file_signature(path)[1:] != [size, mtime_ns]:
        raise ValueError("the file has changed during the run")
    return file


def split_name(name: bytes) -> tuple[str, str]:
    """The key and the extension of a member: "dogs/1.seg.PNG" gives "dogs/1" and "seg.png"."""
    folder, slash, file = name.decode(errors="surrogateescape").rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def members_of(path: Path) -> np.ndarray:
    """The members of a tar file, in the order of their samples.

    As in webdataset, files without an extension, or whose name begins with a dot, are passed over.
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
                    rows.append((name, 0, member.offset_data, member.size, samples.setdefault(key, len(samples))))
            end = tar.offset
        with open(path, "rb") as file:  # Python's tarfile takes an archive that is cut off for one that ends there
            file.seek(end)
            if (rest := file.read(2**20)).strip(b"\0") or not rest:
                raise ValueError(
                    "another archive follows" if rest else "it ends without the blocks that end an archive"
                )
    except (ValueError, tarfile.TarError, OSError) as error:
        after = f", after {rows[-1][0].decode(errors='replace')}" if rows else ""
        raise UnreadableItem(f"{path} is not a whole, uncompressed tar file ({error}{after})") from error
    if passed_over:
        show(f"{path}: {plural(len(passed_over), 'member')} without an extension left out, such as {passed_over[0]}")
    rows.sort(key=lambda row: row[-1])
    longest = max((len(name) for name, *_ in rows), default=1)
    return np.array(rows, [("name", f"S{longest}"), *((name, "i8") for name in ("file", "offset", "size", "sample"))])


# Images with labels


def load_tar_split(
    paths: list[str], class_files: list[str], image_column: str | None, label_column: str | None, cache_dir: str | None
) -> tuple[TarFiles, torch.Tensor, list[str] | None]:
    """The rows, the labels, int64 (N,), and the names of the classes.

    A sample is an image and its label: the text of a `.cls` or `.txt`, or the entry `label` of a `.json`. A label is a
    number, or a name in one of `class_files`, which has one per line.
    """
    if packed := [path for path in paths if not path.lower().endswith(".tar")]:
        stop(f"--dataset: {packed[0]} is compressed, but must be read at any place: unpack it to a .tar")
    with stop_if_unreadable(f"{class_files}"):
        if len(class_files) > 1:
            raise ValueError("only one of them may be there")
        classes = Path([*class_files, os.devnull][0]).read_text(encoding="utf-8").split("\n")
    classes = [name.strip() for name in classes if name.strip()]
    images, read_label = (image_column,) if image_column else IMAGES, functools.partial(label_of, label_column, classes)
    rows = TarFiles(paths, functools.partial(as_row, image_column), extensions=images, cache_dir=cache_dir)
    labels = TarFiles(paths, read_label, extensions={*LABELS, label_column or "cls"}, cache_dir=cache_dir)
    folder = rows.folder.with_name(digest([rows.folder.name, label_column, classes]))
    build_once(folder, functools.partial(save_labels, labels, folder))
    return rows, torch.from_numpy(np.load(folder / "labels.npy")), classes or None


def save_labels(labels: TarFiles, folder: Path) -> None:
    with stop_at_unreadable_items(), ThreadPoolExecutor(4 * share_of_cores()) as threads:
        np.save(folder / "labels.npy", np.array([*threads.map(labels.__getitem__, range(len(labels)))], np.int64))


def as_row(image_column: str | None, sample: dict) -> dict:
    """The sample as a row of `datasets` with an image that is not decoded."""
    names = [name for name in sample if not name.startswith("__")]
    images = [name for name in names if name in IMAGES and not image_column] or names
    if len(images) != 1:
        raise ValueError(f"it has {plural(len(images), 'image')} ({', '.join(images)}): see --image_column")
    path = f"{sample['__url__']}: {sample['__key__']}.{images[0]}"
    return {"image": {"bytes": sample[images[0]], "path": path}}


def label_of(label_column: str | None, classes: list[str], sample: dict) -> int:
    names = [name for last in (label_column, *LABELS) for name in sample if last and f".{name}".endswith(f".{last}")]
    if not names:
        raise ValueError(f"it has no label: none of .{', .'.join(LABELS)}")
    label = sample[names[0]].decode().strip()
    if names[0].endswith("json"):
        label = json.loads(label)
        label = label[label_column or "label"] if isinstance(label, dict) else label
    if label in classes:
        return classes.index(label)
    if isinstance(label, bool) or not str(label).isdecimal():  # isdecimal: int() would take "-1" and 1.5, too
        raise ValueError(f"its label is {label!r}, but labels are numbers from 0, or names in classes.txt")
    return int(label)
