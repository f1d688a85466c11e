"""Images in memory, and batches whose content does not depend on how many processes share them."""

import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from utils import stop

BUNDLED_MNIST = str(Path(__file__).resolve().parents[1] / "data" / "mnist")
TEST_SPLITS = ("test", "validation", "val")


class Images(NamedTuple):
    """A split in memory. images: uint8 (N, C, H, W), 0 to 255, C 1 or 3; labels: int64 (N,)."""

    images: torch.Tensor
    labels: torch.Tensor
    classes: list[str]


def load_images(dataset: str, num_workers: int = 0) -> tuple[Images, Images]:
    """The train and test split of `dataset`, each image decoded once.

    `dataset`: a folder of parquet files or of images as train/<class>/*.png and test/<class>/*.png, or else a Hub id;
    all three through `datasets.load_dataset`. All images must be of one size. `num_workers`: threads that decode them.

    Raises: SystemExit, in one sentence, if it is not there, has no train or test split, no image or label column, or
    an image that cannot be decoded or has another size.
    """
    import datasets  # here and not above: it takes a second that a wrong flag need not wait for

    if Path(dataset).is_dir():
        datasets.disable_progress_bars()
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or Path(dataset).exists():
        stop(f"--dataset {dataset} is neither a folder nor a Hub id such as ylecun/mnist")
    try:
        splits = datasets.load_dataset(dataset)
    except Exception as error:  # the library raises some twenty kinds here; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        stop(f"--dataset {dataset} is no folder here and cannot be loaded from the Hub either, or is damaged: {reason}")
    test = next((name for name in TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}; needed are train and one of {TEST_SPLITS}")
    train_data, test_data = (decode_split(splits[name], dataset, num_workers) for name in ("train", test))
    shapes = tuple(train_data.images.shape[1:]), tuple(test_data.images.shape[1:])
    if shapes[0] != shapes[1]:
        stop(f"--dataset {dataset} has train images of {shapes[0]} and test images of {shapes[1]} (C, H, W)")
    if int(test_data.labels.max()) >= len(train_data.classes):
        stop(f"--dataset {dataset} has the label {int(test_data.labels.max())} in {test}, but not in train")
    return train_data, test_data


def decode_split(split, dataset: str, num_workers: int) -> Images:
    """Decode a `datasets.Dataset` with an Image column and a ClassLabel (or integer) column."""
    import datasets

    features = split.features
    image_column = next((name for name, kind in features.items() if isinstance(kind, datasets.Image)), None)
    label_column = next((name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if label_column is None and getattr(features.get("label"), "dtype", "").startswith("int"):
        label_column = "label"
    if image_column is None or label_column is None or len(split) == 0:
        stop(f"--dataset {dataset} has {len(split)} rows of {list(features)}; needed are an image and a label column")
    labels = torch.tensor(split.with_format("numpy")[label_column][:], dtype=torch.int64)
    if labels.min() < 0:
        stop(f"--dataset {dataset} has rows without a label, the first is row {int((labels < 0).nonzero()[0])}")
    classes = getattr(features[label_column], "names", None) or [str(label) for label in range(int(labels.max()) + 1)]
    cells = split.data.column(image_column).combine_chunks()
    contents, paths = cells.field("bytes").to_pylist(), cells.field("path").to_pylist()
    pixels = decode_pgm(contents)
    if pixels is None:
        pixels = decode_any(contents, paths, dataset, num_workers)
    return Images(torch.from_numpy(pixels), labels, classes)


def decode_pgm(contents: list[bytes | None]) -> np.ndarray | None:
    """Binary 8-bit PGM files of one size to uint8 (N, 1, H, W), 20 times faster than PIL; None if they are not that."""
    header = re.match(rb"P5\s(\d+)\s(\d+)\s255\s", contents[0] or b"")
    if not header:
        return None
    width, height, start = int(header[1]), int(header[2]), header.end()
    if any(file is None or len(file) != start + width * height or file[:start] != header[0] for file in contents):
        return None
    return (
        np.frombuffer(bytearray().join(contents), np.uint8)
        .reshape(-1, start + width * height)[:, start:]
        .reshape(-1, 1, height, width)
    )


def decode_any(contents: list[bytes | None], paths: list[str | None], dataset: str, num_workers: int) -> np.ndarray:
    """Image files of one size in any format PIL reads to uint8 (N, C, H, W); grey stays C = 1, all else becomes RGB."""
    from concurrent.futures import ThreadPoolExecutor

    from PIL import Image

    def decode(row, mode=None):
        name = paths[row] or f"the image in row {row}"
        try:
            with Image.open(paths[row] if contents[row] is None else io.BytesIO(contents[row])) as image:
                mode = mode or ("L" if image.mode in ("1", "L") else "RGB")
                return np.asarray(image.convert(mode)), mode
        except (OSError, ValueError, SyntaxError) as error:
            stop(f"--dataset {dataset}: {name} cannot be decoded: {error}")

    first, mode = decode(0)
    pixels = np.empty((len(contents), *first.shape), np.uint8)

    def decode_into(row):
        image, _ = decode(row, mode)
        if image.shape != first.shape:
            sizes = "x".join(map(str, image.shape[1::-1])), "x".join(map(str, first.shape[1::-1]))
            name = paths[row] or f"the image in row {row}"
            stop(f"--dataset {dataset}: {name} has {sizes[0]} pixels and the first image {sizes[1]}: make them equal")
        pixels[row] = image

    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        for _ in pool.map(decode_into, range(len(contents))):  # raises here what a thread raised
            pass
    return pixels[:, None] if mode == "L" else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def fingerprint(*splits: Images) -> str:
    """16 hex digits that change when an image, a label, or their order changes, and not when the folder moves."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (split.images, split.labels):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()[:16]


def load_grey_image(path: str, side: int) -> torch.Tensor:
    """One image file as uint8 (1, 1, side, side). Raises: SystemExit if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("L").resize((side, side))))[None, None]
    except (OSError, ValueError, SyntaxError) as error:
        stop(f"{path} cannot be read as an image: {error}")


def describe(dataset: str, train: Images, test: Images) -> dict:
    """What run.json and the banner say of the data."""
    return {
        "dataset": dataset,
        "train": len(train.labels),
        "test": len(test.labels),
        "shape": "x".join(map(str, train.images.shape[1:])),
        "classes": len(train.classes),
        "fingerprint": fingerprint(train, test),
    }


class Batch(NamedTuple):
    """One process's share of one micro-batch. update_size: samples of the whole update, over all processes and
    micro-batches; a loss summed over the samples and divided by it gives the gradient of the mean over the update."""

    images: torch.Tensor  # uint8 (n, C, H, W), on the accelerator's device
    labels: torch.Tensor  # int64 (n,)
    indices: torch.Tensor  # int64 (n,): which samples these are; the same numbers on any topology
    update_size: int


class GlobalBatches:
    """Batches of `batch_size` samples over all processes and accumulation steps together.

    The order is permutation(seed, epoch), or that of the data with `seed=None`. Update s of an epoch takes samples
    s x batch_size and following of it, cut into accumulation x processes pieces of equal length (+-1 in the last
    update of an epoch, which has what is left, down to nothing). So each sample comes once an epoch, nothing is
    padded or dropped, every process sees the same number of micro-batches, and any update is found without a replay.

    Accelerate's own sharding pads the last batch with samples that were already used, or gives some processes one
    batch less than others; and it can resume only by skipping through the batches before.
    """

    def __init__(
        self, data: Images, batch_size: int, accelerator: Accelerator, seed: int | None = None, accumulation: int = 1
    ):
        self.images, self.labels = data.images.to(accelerator.device), data.labels.to(accelerator.device)
        self.batch_size, self.seed, self.accumulation = batch_size, seed, accumulation
        self.num_processes, self.process_index = accelerator.num_processes, accelerator.process_index

    def __len__(self) -> int:
        """Updates an epoch."""
        return -(-len(self.labels) // self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample indices of an epoch, int64 (N,)."""
        if self.seed is None:
            return torch.arange(len(self.labels))
        # mixed: torch's generator on the CPU looks at the low 32 bits of its seed alone
        generator = torch.Generator().manual_seed(mix_bits(mix_bits(self.seed) + epoch))
        return torch.randperm(len(self.labels), generator=generator)

    def epoch(self, epoch: int = 0, first_update: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, `accumulation` for each update from `first_update` on."""
        order = self.order(epoch).to(self.labels.device)
        for start in range(first_update * self.batch_size, len(order), self.batch_size):
            update = order[start : start + self.batch_size]
            pieces = update.tensor_split(self.accumulation * self.num_processes)
            for indices in pieces[self.process_index :: self.num_processes]:
                # index_select copies whole images: 5 times faster than images[indices]
                images, labels = self.images.index_select(0, indices), self.labels.index_select(0, indices)
                yield Batch(images, labels, indices, len(update))


def mix_bits(x):
    """A bijection on 32-bit integers (an int, or an int64 tensor) in which a flipped bit of x flips about half of all.

    Source: "lowbias32" of C. Wellons, https://nullprogram.com/blog/2018/07/31/.
    """
    mask = 0xFFFFFFFF
    x = x & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


def random_uniform(seed: int, step: int, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform numbers in [0, 1), float32 (n, *shape): a pure function of (seed, step, sample index, position).

    For dropout and augmentation that are the same on any topology, device and after a resume: a random generator's
    numbers depend on what the process drew before, and on how many samples it holds. Different `seed`s for different
    uses in one step.

    """
    positions = torch.arange(int(np.prod(shape)), device=indices.device)
    keys = mix_bits(mix_bits(mix_bits(seed) + step) + indices)
    bits = mix_bits(keys[:, None] + mix_bits(positions + 1))
    return ((bits >> 8).to(torch.float32) / 2**24).view(len(indices), *shape)
