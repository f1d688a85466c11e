"""Image datasets from a folder or the Hub, decoded into memory once."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from utils.console import stop

from .hub import TEST_SPLITS, load_dataset

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


def load_images(dataset: str) -> tuple[LabelledImages, LabelledImages]:
    """As `load_splits`, but decoded into memory. All images must have the same size."""
    train_data, test_data = map(decode_split, load_splits(dataset))
    shapes = [tuple(data.tensors[0].shape[1:]) for data in (train_data, test_data)]
    if shapes[0] != shapes[1]:
        stop(f"--dataset {dataset} has train images of {shapes[0]} and test images of {shapes[1]} (C, H, W)")
    return train_data, test_data


def load_splits(dataset: str) -> tuple[Split, Split]:
    """The train and test split of a dataset, through `datasets.load_dataset`; nothing is decoded.

    Args:
        dataset: a folder of parquet files, a folder of images as train/<class>/*.png and test/<class>/*.png, or a
            Hub id. MNIST needs no network.
    """
    folder = MNIST_FOLDER if dataset == MNIST and MNIST_FOLDER.is_dir() else Path(dataset)
    splits = list_images(folder) or load_dataset(dataset, MNIST, folder)
    test = next((name for name in TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}; it needs train and one of {TEST_SPLITS}")
    train_split, test_split = (find_columns(splits[name], dataset) for name in ("train", test))
    if unknown := set(test_split.labels.tolist()) - set(train_split.labels.tolist()):
        stop(f"--dataset {dataset} has the label {min(unknown)} in {test}, but not in train")
    return train_split, test_split


def list_images(folder: Path) -> dict | None:
    """The splits of a folder of images as train/<class>/<file> and test/<class>/<file>; None: it has another form.

    They are as those of `datasets.load_dataset`, which looks through such a folder forty times: in each process and at
    each start, 20 minutes for a million images.
    """
    import datasets
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    extensions, files = {*ImageFolder.EXTENSIONS}, {}
    for top, folders, names in os.walk(folder):
        split, *labels = Path(top).relative_to(folder).parts or [""]
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in names if not name.startswith(".")]
        if split not in ("", "train", *TEST_SPLITS) or any(os.path.islink(f"{top}/{name}") for name in folders):
            return None
        if len(labels) != 1:
            if names and (split or names != ["README.md"]):
                return None
            continue
        if any(os.path.splitext(name)[1].lower() not in extensions for name in names):
            return None
        files.setdefault(split, []).extend((f"{top}/{name}", labels[0]) for name in names)
    classes = sorted({label for entries in files.values() for _, label in entries})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)})
    splits = {}
    for split, entries in files.items():
        if entries:
            paths, labels = zip(*sorted(entries), strict=True)
            splits[split] = datasets.Dataset.from_dict({"image": [*paths], "label": [*labels]}, features=features)
    return splits


def find_columns(rows, dataset: str) -> Split:
    """The Image column and the ClassLabel column, or else the integer column "label", of a `datasets.Dataset`."""
    import datasets

    def first_of(kind):
        return next((name for name, feature in rows.features.items() if isinstance(feature, kind)), None)

    image_column, label_column = first_of(datasets.Image), first_of(datasets.ClassLabel)
    if label_column is None and getattr(rows.features.get("label"), "dtype", "").startswith(("int", "uint")):
        label_column = "label"
    if image_column is None or label_column is None or len(rows) == 0:
        columns = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in rows.features.items()}
        stop(
            f"--dataset {dataset} has {len(rows)} rows of {columns}; it needs an Image column, and a ClassLabel "
            "column or an integer column `label`"
        )
    # From the table itself: six times as fast as through the numpy format.
    labels = torch.tensor(rows.data.column(label_column).to_numpy(), dtype=torch.int64)
    if labels.min() < 0:
        stop(f"--dataset {dataset} has rows without a label, the first of them row {int((labels < 0).nonzero()[0])}")
    classes, largest = getattr(rows.features[label_column], "names", None), int(labels.max())
    if classes and largest >= len(classes):
        stop(f"--dataset {dataset} has the label {largest}, but {len(classes)} classes: number them from 0")
    classes = classes or [str(label) for label in range(largest + 1)]
    return Split(dataset, rows.cast_column(image_column, datasets.Image(decode=False)), image_column, labels, classes)


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
