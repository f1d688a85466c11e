"""Images for the scripts: data sets from a folder or the Hub, decoded into memory once."""

import io
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ..console import is_local_main, show, stop

# All of MNIST lies beside this package; a copy of a script without it takes the same from the Hub.
MNIST_FOLDER = Path(__file__).resolve().parents[2] / "data" / "mnist"
BUNDLED_MNIST = str(MNIST_FOLDER) if MNIST_FOLDER.is_dir() else "ylecun/mnist"
MAX_CLASSES = 2**20
TEST_SPLITS = ("test", "validation", "val")


class LabelledImages(TensorDataset):
    """A split in memory, for GlobalLoader.

    Args:
        images: uint8 (N, C, H, W), 0 to 255; C is 1 or 3.
        labels: int64 (N,).
        classes: their names.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, classes: list[str]):
        super().__init__(images, labels)
        self.images, self.labels, self.classes = images, labels, classes


class Split(NamedTuple):
    """A split on the disk."""

    dataset: str  # as given on the command line, for messages
    rows: object  # a datasets.Dataset whose images come as files
    image_column: str
    labels: torch.Tensor  # int64 (N,)
    classes: list[str]


def load_splits(dataset: str) -> tuple[Split, Split]:
    """The train and test split of a dataset, through `datasets.load_dataset`; nothing is decoded.

    Args:
        dataset: a folder of parquet files, a folder of images as train/<class>/*.png and test/<class>/*.png, or a
            Hub id.

    Raises:
        SystemExit: if it is not there, or has no train or test split, no image or label column.
    """
    # here and not above: a wrong flag need not wait for it
    import datasets

    if not is_local_main():  # what the Hub says, once a machine is enough
        import huggingface_hub

        datasets.logging.set_verbosity_error()
        huggingface_hub.logging.set_verbosity_error()
        datasets.disable_progress_bars()
    if Path(dataset).is_dir():
        datasets.disable_progress_bars()
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or Path(dataset).exists():
        stop(f"--dataset {dataset} is neither a folder nor a Hub id such as ylecun/mnist")
    try:
        splits = datasets.load_dataset(dataset)
        if Path(dataset).is_dir() and next(iter(splits.values())).info.builder_name == "parquet":
            check_class_names(dataset)
    except Exception as error:  # the library raises some twenty kinds here; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        cache = str(datasets.config.HF_DATASETS_CACHE)
        if cache in reason:
            stop(f"the cache {cache} cannot be used ({reason}): remove it, or set HF_HOME")
        if Path(dataset).is_dir():
            stop(
                f"--dataset {dataset} is a folder without a data set, or with a damaged one: "
                f"{reason}; if its files are whole, remove their copies in the cache {cache}"
            )
        stop(f"--dataset {dataset} is not a folder and cannot be loaded from the Hub either: {reason}")
    test = next((name for name in TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}; needed are train and one of {TEST_SPLITS}")
    train_split, test_split = (find_columns(splits[name], dataset) for name in ("train", test))
    if int(test_split.labels.max()) >= len(train_split.classes):
        stop(f"--dataset {dataset} has the label {int(test_split.labels.max())} in {test}, but not in train")
    missing = sorted(set(test_split.labels.tolist()) - set(train_split.labels.tolist()))
    if missing and is_local_main():
        names = ", ".join(train_split.classes[label] for label in missing[:5])
        more = ", ..." if len(missing) > 5 else ""
        show(f"warning: {test} has classes that train has no image of: {names}{more}", "yellow")
    return train_split, test_split


def check_class_names(dataset: str) -> None:
    """Check that all parquet files in the folder number their classes alike.

    `datasets` reads the labels of all files with the class names of the first one.

    Raises:
        SystemExit: if two files differ.
    """
    import datasets
    import pyarrow.parquet

    first_path, first_names = None, None
    for path in sorted(Path(dataset).rglob("*.parquet")):
        features = datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))
        kinds = features.values()
        names = [kind.names for kind in kinds if isinstance(kind, datasets.ClassLabel)]
        if not names:  # plain integers
            continue
        if first_names is None:
            first_path, first_names = path, names
        if names != first_names:
            stop(
                f"--dataset {dataset} numbers its classes differently in {first_path.name} "
                f"({show_classes(first_names)}) and {path.name} ({show_classes(names)}): write "
                "both with the same names in the same order"
            )


def show_classes(columns: list[list[str]]) -> str:
    names = [name for column in columns for name in column]
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def find_columns(rows, dataset: str) -> Split:
    """The Image column and the ClassLabel (or integer) column of a `datasets.Dataset`."""
    import datasets

    features = rows.features
    image_column = next((name for name, kind in features.items() if isinstance(kind, datasets.Image)), None)
    label_column = next((name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if label_column is None and getattr(features.get("label"), "dtype", "").startswith("int"):
        label_column = "label"
    if image_column is None or label_column is None or len(rows) == 0:
        stop(f"--dataset {dataset} has {len(rows)} rows of {list(features)}; needed are an image and a label column")
    # From the table itself: through a numpy format it takes six times as long.
    labels = torch.tensor(rows.data.column(label_column).to_numpy(), dtype=torch.int64)
    if labels.min() < 0:
        stop(f"--dataset {dataset} has rows without a label, the first is row {int((labels < 0).nonzero()[0])}")
    classes = getattr(features[label_column], "names", None)
    largest = int(labels.max())
    if largest >= (len(classes) if classes else MAX_CLASSES):
        known = f"{len(classes)} classes" if classes else f"{MAX_CLASSES} classes at most"
        stop(
            f"--dataset {dataset} has the label {largest} in row {int(labels.argmax())}, and "
            f"{known}: number them from 0 on"
        )
    classes = classes or [str(label) for label in range(largest + 1)]
    return Split(dataset, rows.cast_column(image_column, datasets.Image(decode=False)), image_column, labels, classes)


def load_images(dataset: str) -> tuple[LabelledImages, LabelledImages]:
    """Both splits of `load_splits`, decoded into memory. All images must be of one size.

    Raises:
        SystemExit: as `load_splits`, and if an image cannot be decoded or has a different size.
    """
    train_data, test_data = map(decode_split, load_splits(dataset))
    shapes = tuple(train_data.images.shape[1:]), tuple(test_data.images.shape[1:])
    if shapes[0] != shapes[1]:
        stop(f"--dataset {dataset} has train images of {shapes[0]} and test images of {shapes[1]} (C, H, W)")
    return train_data, test_data


def decode_split(split: Split) -> LabelledImages:
    cells = split.rows.data.column(split.image_column)
    pixels = decode_pgm([chunk.field("bytes") for chunk in cells.chunks if len(chunk)])
    if pixels is None:
        cells = cells.combine_chunks()
        contents, paths = cells.field("bytes").to_pylist(), cells.field("path").to_pylist()
        pixels = decode_any(contents, paths, split.dataset)
    return LabelledImages(torch.from_numpy(pixels), split.labels, split.classes)


def decode_pgm(chunks: list) -> np.ndarray | None:
    """Decode binary 8-bit PGM files of one size in one copy.

    Args:
        chunks: arrays (pyarrow.BinaryArray) with a file in each element, none empty. The bytes of an array lie one
            file after the other: files of one length are the rows of a matrix.

    Returns:
        uint8 (N, 1, H, W), or None if the files are of a different kind.
    """
    header = re.match(rb"P5\s(\d+)\s(\d+)\s255\s", chunks[0][0].as_py() or b"")
    if not header:
        return None
    width, height, start = int(header[1]), int(header[2]), header.end()
    length = start + width * height
    if width * height == 0:
        return None
    pixels = np.empty((sum(map(len, chunks)), width * height), np.uint8)
    row = 0
    for chunk in chunks:
        _, offsets, content = chunk.buffers()
        offsets = np.frombuffer(offsets, np.int32)[chunk.offset :][: len(chunk) + 1]
        if chunk.null_count or (np.diff(offsets) != length).any():
            return None
        files = np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]].reshape(-1, length)
        if (files[:, :start] != np.frombuffer(header[0], np.uint8)).any():
            return None
        pixels[row : row + len(chunk)] = files[:, start:]
        row += len(chunk)
    return pixels.reshape(-1, 1, height, width)


def to_rgb(image):
    """Convert a PIL image of any mode to 8-bit RGB; transparent pixels become white.

    Raises:
        ValueError: for pixels whose range is unknown: floating point, or integers of over 16 bits.
    """
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits, which PIL's own conversion would clip at 255
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("its pixels are integers of unknown range")
        return Image.fromarray((pixels / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def to_grey(image):
    """Convert a PIL image of any mode to 8-bit grey, as `to_rgb`."""
    return image if image.mode == "L" else to_rgb(image).convert("L")


def decode_any(contents: list[bytes | None], paths: list[str | None], dataset: str) -> np.ndarray:
    """Decode image files of one size, in any format that PIL reads, with a thread per core.

    Returns:
        uint8 (N, C, H, W); C is 1 if all of them are grey, else 3.
    """
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    def read(row, use):
        """`use` of an open image."""
        try:
            content = contents[row]
            with Image.open(paths[row] if content is None else io.BytesIO(content)) as image:
                return use(image)
        except Exception as error:  # PIL has no common class for what its thirty readers raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{name(row)} cannot be decoded: {reason}") from error

    def name(row):
        return paths[row] or f"the image in row {row}"

    def is_grey(image):  # known from the header: nothing is decoded
        return image.mode in ("1", "L") or image.mode.startswith("I")

    def decode(row):
        convert = to_grey if all_grey else to_rgb
        return read(row, lambda image: np.asarray(convert(image)))

    def decode_into(row):
        image = decode(row)
        if image.shape != first.shape:
            sizes = [f"{shape[1]}x{shape[0]}" for shape in (image.shape, first.shape)]
            raise ValueError(f"{name(row)} has {sizes[0]} pixels and the first image {sizes[1]}: make them equal")
        pixels[row] = image

    rows = range(len(contents))
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            all_grey = all(pool.map(lambda row: read(row, is_grey), rows))
            first = decode(0)
            pixels = np.empty((len(contents), *first.shape), np.uint8)
            for _ in pool.map(decode_into, rows):  # raises here what a thread raised
                pass
    except ValueError as error:
        stop(f"--dataset {dataset}: {error}")
    return pixels[:, None] if all_grey else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
