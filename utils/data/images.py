"""Labelled images from a folder, parquet, tar files or the Hub: their rows, or all of them decoded into memory."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ..console import plural, stop
from .files import TEST_SPLITS, announce, find_data

# The repository contains MNIST; a copy of utils/ without it loads MNIST from the Hub.
MNIST, MNIST_FOLDER = "ylecun/mnist", Path(__file__).resolve().parents[2] / "data" / "mnist"
KINDS = {".parquet": "parquet"} | dict.fromkeys((".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"), "tar")
CLASSES = ("classes.txt", "classnames.txt")  # beside tar files
MOST_CLASSES = 10**6  # labels without names


class LabelledImages(TensorDataset):
    """A split in memory: images, uint8 (N, C, H, W), C 1 or 3; labels, int64 (N,), indices into `classes`."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, classes: list[str]):
        super().__init__(images, labels)
        self.images, self.labels, self.classes = images, labels, classes


class Split(NamedTuple):
    """A split on disk."""

    dataset: str  # as given on the command line, for messages
    rows: object  # a datasets.Dataset whose images are not decoded, or TarFiles
    image_column: str
    labels: torch.Tensor  # int64 (N,)
    classes: list[str]


def load_images(dataset: str, **options) -> tuple[LabelledImages, LabelledImages]:
    """As `load_splits`, but decoded into memory. All images must have the same size."""
    train_data, test_data = map(decode_split, load_splits(dataset, **options))
    return train_data, test_data


def load_splits(
    dataset: str, image_column: str | None = None, label_column: str | None = None, cache_dir: str | None = None
) -> tuple[Split, Split]:
    """The train and test split of a dataset; nothing is decoded.

    A dataset is a folder of parquet files, of tar files (see tar_files), or of images as train/<class>/* and
    test/<class>/*; or a Hub id. MNIST needs no network. The columns are the only ones of an Image and a ClassLabel, or
    else the integers `label`.
    """
    folder = str(MNIST_FOLDER) if dataset == MNIST and MNIST_FOLDER.is_dir() else dataset
    kind, splits, left_out = find_data(folder, KINDS, "images", cache_dir)
    if {*splits} != {"train", "test"}:
        stop(f"--dataset {dataset} needs train and one of {TEST_SPLITS}, such as train/<class>/1.png")
    if kind == "tar":
        from .tar_files import load_tar_split

        options = [Path(dataset, name) for name in CLASSES if name in left_out], image_column, label_column, cache_dir
        left_out = [name for name in left_out if name not in CLASSES]
        found = [load_tar_split([*splits[name].values()], *options) for name in ("train", "test")]
        found = [Split(dataset, rows, "image", *labels) for rows, *labels in found]
    else:
        if kind == "images":
            from .image_files import list_images

            splits = list_images(dataset, splits)
        found = [find_columns(splits[name], dataset, image_column, label_column) for name in ("train", "test")]
    train, test = name_classes(*found)
    numbers = f"{len(train.labels):,} images for training, {len(test.labels):,} for testing"
    announce(dataset, f"{numbers}, {plural(len(train.classes), 'class')}", left_out)
    return train, test


def find_columns(rows, dataset: str, image_column: str | None, label_column: str | None) -> Split:
    """The columns of a `datasets.Dataset` with images and labels."""
    import datasets

    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    classes = [name for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)] or ["label"]
    names = [*([image_column] if image_column else images), *([label_column] if label_column else classes)]
    found = [*map(rows.features.get, names)]
    if len(found) != 2 or not isinstance(found[0], datasets.Image) or "int" not in getattr(found[1], "dtype", ""):
        stop(f"--dataset {dataset} has the columns {[*rows.features]}: choose by --image_column and --label_column")
    image_column, label_column = names
    for column in (image_column, label_column):  # on some processors, a label that is missing would be 0
        if missing := rows.data.column(column).null_count:
            stop(f"--dataset {dataset} has {plural(missing, 'row')} without {column}: remove them")
    # From the table itself: six times as fast as through the numpy format.
    labels = torch.tensor(rows.data.column(label_column).to_numpy(), dtype=torch.int64)
    names = getattr(rows.features[label_column], "names", None)
    return Split(dataset, rows.cast_column(image_column, datasets.Image(decode=False)), image_column, labels, names)


def name_classes(train: Split, test: Split) -> list[Split]:
    """The splits with the same classes: their names, or the numbers from 0 to the largest label."""
    labels = torch.cat([train.labels, test.labels])
    most = len(train.classes or range(MOST_CLASSES))
    if not len(labels) or labels.min() < 0 or labels.max() >= most:
        stop(f"--dataset {train.dataset} has labels that are not from 0 to {most - 1}: {labels.unique()}")
    if unknown := {*test.labels.tolist()} - {*train.labels.tolist()}:
        stop(f"--dataset {train.dataset} has the label {min(unknown)} in test, but not in train")
    classes = train.classes or [str(label) for label in range(int(labels.max()) + 1)]
    return [split._replace(classes=classes) for split in (train, test)]


def decode_split(split: Split) -> LabelledImages:
    cells = split.rows.data.column(split.image_column).combine_chunks()
    pixels = decode_pgm(cells.field("bytes").to_pylist())
    if pixels is None:
        from .image_files import decode_images

        pixels = decode_images(cells.to_pylist())
    return LabelledImages(torch.from_numpy(pixels), split.labels, split.classes)


def decode_pgm(files: list[bytes | None]) -> np.ndarray | None:
    """Decode binary 8-bit PGM files of one size, such as MNIST's, to uint8 (N, 1, H, W); None for other files."""
    header = re.match(rb"P5\s([1-9]\d*)\s([1-9]\d*)\s255\s", files[0] or b"")
    if not header:
        return None
    width, height = map(int, header.groups())
    length = header.end() + width * height
    if any(file is None or len(file) != length or not file.startswith(header[0]) for file in files):
        return None
    rows = np.frombuffer(b"".join(files), np.uint8).reshape(len(files), length)
    return np.ascontiguousarray(rows[:, header.end() :]).reshape(-1, 1, height, width)
