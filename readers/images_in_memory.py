"""Image datasets from a folder or the Hub, decoded into memory once."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from utils.console import plural, stop

from .files import TEST_SPLITS, announce, find_split, list_files, read_schema, split_files
from .hub import load_dataset

MOST_CLASSES = 10**6  # labels without names
# The repository contains MNIST; a copy of utils/ without it loads MNIST from the Hub.
MNIST, MNIST_FOLDER = "ylecun/mnist", Path(__file__).resolve().parents[1] / "data" / "mnist"


class LabelledImages(TensorDataset):
    """A split in memory: images, uint8 (N, C, H, W), C 1 or 3; labels, int64 (N,), indices into `classes`."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, classes: list[str]):
        super().__init__(images, labels)
        self.images, self.labels, self.classes = images, labels, classes


class Split(NamedTuple):
    """A split on disk."""

    dataset: str  # as given on the command line, for messages
    rows: object  # a datasets.Dataset whose images are not decoded
    image_column: str
    labels: torch.Tensor  # int64 (N,)
    classes: list[str]


def load_images(
    dataset: str, image_column: str | None = None, label_column: str | None = None
) -> tuple[LabelledImages, LabelledImages]:
    """As `load_splits`, but decoded into memory. All images must have the same size."""
    train_data, test_data = map(decode_split, load_splits(dataset, image_column, label_column))
    shapes = [tuple(data.images.shape[1:]) for data in (train_data, test_data)]
    if shapes[0] != shapes[1]:
        stop(f"--dataset {dataset} has train images of {shapes[0]} and test images of {shapes[1]} (C, H, W)")
    return train_data, test_data


def load_splits(dataset: str, image_column: str | None = None, label_column: str | None = None) -> tuple[Split, Split]:
    """The train and test split of a dataset; nothing is decoded.

    Args:
        dataset: a folder of parquet files, a folder of images as train/<class>/* and test/<class>/*, or a Hub id. For
            the names of splits, see `split_files`. MNIST needs no network.
        image_column, label_column: of rows; None: the only Image and ClassLabel column, or else the integers `label`.
    """
    folder = MNIST_FOLDER if dataset == MNIST and MNIST_FOLDER.is_dir() else Path(dataset)
    files, left_out = list_files(folder)
    not_parquet = [name for name in files if not name.lower().endswith(".parquet")]
    if 0 < len(not_parquet) < len(files):
        stop(f"--dataset {dataset} has parquet files, and {not_parquet[0]}, which is not one: remove it")
    by_split, others = split_files(dataset, files)
    if files and not not_parquet:
        compare_labels(files)
        splits, _ = load_dataset(dataset, MNIST, by_split)
    elif files or folder.is_dir():
        splits = list_images(dataset, by_split)
    else:
        splits, others = load_dataset(dataset, MNIST)
    if not {"train", "test"} <= {*splits}:
        found = ", ".join(filter(None, splits)) or "no names of splits"
        stop(f"--dataset {dataset} has {found}; it needs train and one of {TEST_SPLITS}, as train/<class>/1.png")
    train, test = (find_columns(splits[name], dataset, image_column, label_column) for name in ("train", "test"))
    if unknown := {*test.labels.tolist()} - {*train.labels.tolist()}:
        stop(f"--dataset {dataset} has the label {min(unknown)} in test, but not in train")
    columns = "" if train.image_column == "image" else f" of column {train.image_column}"
    numbers = f"{len(train.labels):,} images for training, {len(test.labels):,} for testing"
    announce(dataset, f"{numbers}{columns}, {plural(len(train.classes), 'class')}", [*left_out, *others])
    return train, test


def compare_labels(files: dict[str, str]) -> None:
    """Check that all parquet files have the same names of classes: `datasets` takes those of the first."""
    import datasets

    found = {}
    for path in files.values():
        features = datasets.Features.from_arrow_schema(read_schema(path))
        names = {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}
        found.setdefault(repr(names), path)
        if len(found) > 1:
            stop(f"--dataset: {path} has other classes than {next(iter(found.values()))}: {' and '.join(found)}")


def list_images(dataset: str, splits: dict[str, dict[str, str]]) -> dict:
    """The splits of a folder of images as train/<class>/<file> and test/<class>/<file>.

    The result equals that of `datasets.load_dataset`, which takes 20 minutes for a million images, in each process and
    at each start.
    """
    import datasets
    import pyarrow

    names = {name: path for files in splits.values() for name, path in files.items()}
    for folder, name in {name.rpartition("/")[0]: name for name in names}.items():
        if folder.count("/") != find_split(dataset, name)[1] + 1:
            stop(f"--dataset {dataset}: {name} is not in a folder of its class, such as train/dog/1.jpg: move it")
    if odd := next((name for name in names if re.search("[\ud800-\udfff]", name)), None):
        stop(f"--dataset {dataset} has the file {odd!a}, whose name is not UTF-8: rename it")
    check_images(dataset, names.values())
    classes = {name: number for number, name in enumerate(sorted({name.split("/")[-2] for name in names}))}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*classes])})
    rows = {}
    for split, files in splits.items():
        paths = sorted(files.values())
        without_bytes = pyarrow.nulls(len(paths), pyarrow.binary())
        cells = pyarrow.StructArray.from_arrays([without_bytes, pyarrow.array(paths)], ["bytes", "path"])
        columns = [cells, [classes[path.rsplit("/", 2)[1]] for path in paths]]
        rows[split] = datasets.Dataset(pyarrow.table(columns, schema=features.arrow_schema))
    return rows


def check_images(dataset: str, paths: Iterable[str]) -> None:
    """Check that Pillow opens such files: by the extension, or else by the content."""
    from PIL import Image

    known = {extension for extension, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for path in paths:
        if f".{path.rpartition('.')[2].lower()}" not in known:
            try:
                Image.open(path).close()
            except Exception:  # Pillow's readers have no common base class of errors
                stop(f"--dataset {dataset}: {path} is not an image that Pillow opens: convert it, or remove it")


def find_columns(rows, dataset: str, image_column: str | None, label_column: str | None) -> Split:
    """The columns of a `datasets.Dataset` with images and labels."""
    import datasets

    def choose(wanted: str | None, kind: type, flag: str) -> str | None:
        names = [wanted] if wanted else [name for name, feature in rows.features.items() if isinstance(feature, kind)]
        if len(names) > 1 or not {*names} <= {*rows.features}:
            stop(f"--dataset {dataset} has the columns {', '.join(rows.features)}: choose one by {flag}")
        return names[0] if names else None

    image_column = choose(image_column, datasets.Image, "--image_column")
    label_column = choose(label_column, datasets.ClassLabel, "--label_column") or "label"
    columns = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in rows.features.items()}
    is_integer = columns.get(label_column, "").startswith(("int", "uint"))
    if not isinstance(rows.features.get(image_column), datasets.Image) or not is_integer or len(rows) == 0:
        stop(
            f"--dataset {dataset} has {len(rows)} rows of {columns}; it needs an Image column, and a ClassLabel "
            "column or an integer column `label`"
        )
    for column in (image_column, label_column):
        if rows.data.column(column).null_count:
            row = rows.data.column(column).is_null().index(True).as_py()
            stop(f"--dataset {dataset} has a row without {column}, {row}: remove it")
    # From the table itself: six times as fast as through the numpy format.
    labels = torch.tensor(rows.data.column(label_column).to_numpy(), dtype=torch.int64)
    classes = getattr(rows.features[label_column], "names", None)
    if labels.min() < 0:
        stop(f"--dataset {dataset} has rows without a label, the first of them row {int((labels < 0).nonzero()[0])}")
    classes = check_labels(dataset, labels, classes)
    return Split(dataset, rows.cast_column(image_column, datasets.Image(decode=False)), image_column, labels, classes)


def check_labels(dataset: str, labels: torch.Tensor, classes: list[str] | None) -> list[str]:
    """The names of the classes, from 0 to the largest label if there are none."""
    largest = int(labels.max())
    if largest >= (len(classes) if classes else MOST_CLASSES):
        of = f"but {len(classes)} classes" if classes else "which is not the number of a class"
        stop(f"--dataset {dataset} has the label {largest}, {of}: number them from 0")
    return classes or [str(label) for label in range(largest + 1)]


def decode_split(split: Split) -> LabelledImages:
    cells = split.rows.data.column(split.image_column).combine_chunks()
    pixels = decode_pgm(cells.field("bytes").to_pylist())
    if pixels is None:
        from .image_decoding import decode_images

        pixels = decode_images(cells.to_pylist(), split.dataset)
    return LabelledImages(torch.from_numpy(pixels), split.labels, split.classes)


def decode_pgm(files: list[bytes | None]) -> np.ndarray | None:
    """Decode binary 8-bit PGM files of one size, such as MNIST's, to uint8 (N, 1, H, W); None for other files."""
    header = re.match(rb"P5\s([1-9]\d*)\s([1-9]\d*)\s255\s", files[0] or b"")
    if not header:
        return None
    width, height = int(header[1]), int(header[2])
    length = header.end() + width * height
    if any(file is None or len(file) != length or not file.startswith(header[0]) for file in files):
        return None
    rows = np.frombuffer(b"".join(files), np.uint8).reshape(len(files), length)
    return np.ascontiguousarray(rows[:, header.end() :]).reshape(-1, 1, height, width)
