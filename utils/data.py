"""Images in memory, and batches whose content does not depend on how many processes share them."""

import hashlib
import io
import os
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


class Split(NamedTuple):
    """A split on the disk. rows: a `datasets.Dataset` whose images come as files; labels: int64 (N,)."""

    dataset: str  # as given on the command line, for messages
    rows: object  # datasets.Dataset
    image_column: str
    labels: torch.Tensor
    classes: list[str]


def load_splits(dataset: str) -> tuple[Split, Split]:
    """The train and test split of `dataset`, nothing decoded.

    `dataset`: a folder of parquet files or of images as train/<class>/*.png and test/<class>/*.png, or else a Hub id;
    all three through `datasets.load_dataset`.

    Raises: SystemExit, in one sentence, if it is not there, or has no train or test split, no image or label column.
    """
    import datasets  # here and not above: it takes a second that a wrong flag need not wait for

    if os.environ.get("LOCAL_RANK", "0") != "0":  # what the Hub says, once a machine is enough
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
    except Exception as error:  # the library raises some twenty kinds here; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        stop(f"--dataset {dataset} is no folder here and cannot be loaded from the Hub either, or is damaged: {reason}")
    test = next((name for name in TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}; needed are train and one of {TEST_SPLITS}")
    train_split, test_split = (find_columns(splits[name], dataset) for name in ("train", test))
    if int(test_split.labels.max()) >= len(train_split.classes):
        stop(f"--dataset {dataset} has the label {int(test_split.labels.max())} in {test}, but not in train")
    return train_split, test_split


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
    labels = torch.tensor(rows.with_format("numpy")[label_column][:], dtype=torch.int64)
    if labels.min() < 0:
        stop(f"--dataset {dataset} has rows without a label, the first is row {int((labels < 0).nonzero()[0])}")
    classes = getattr(features[label_column], "names", None) or [str(label) for label in range(int(labels.max()) + 1)]
    return Split(dataset, rows.cast_column(image_column, datasets.Image(decode=False)), image_column, labels, classes)


def load_images(dataset: str, num_workers: int = 0) -> tuple[Images, Images]:
    """Both splits of `load_splits` in memory. All images must be of one size. `num_workers`: threads that decode.

    Raises: SystemExit, in one sentence, as `load_splits`, and if an image cannot be decoded or has another size.
    """
    train_data, test_data = (decode_split(split, num_workers) for split in load_splits(dataset))
    shapes = tuple(train_data.images.shape[1:]), tuple(test_data.images.shape[1:])
    if shapes[0] != shapes[1]:
        stop(f"--dataset {dataset} has train images of {shapes[0]} and test images of {shapes[1]} (C, H, W)")
    return train_data, test_data


def decode_split(split: Split, num_workers: int) -> Images:
    cells = split.rows.data.column(split.image_column).combine_chunks()
    contents, paths = cells.field("bytes").to_pylist(), cells.field("path").to_pylist()
    pixels = decode_pgm(contents)
    if pixels is None:
        pixels = decode_any(contents, paths, split.dataset, num_workers)
    return Images(torch.from_numpy(pixels), split.labels, split.classes)


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

    images: torch.Tensor | None  # uint8 (n, C, H, W), on the accelerator's device; None: not loaded
    labels: torch.Tensor  # int64 (n,)
    indices: torch.Tensor  # int64 (n,): which samples these are; the same numbers on any topology
    update_size: int


class GlobalSampler:
    """Which samples each process takes, for batches of `batch_size` over all processes and accumulation steps together.

    The order is permutation(seed, epoch), or that of the data with `seed=None`. Update s of an epoch takes samples
    s x batch_size and following of it, cut into accumulation x processes pieces of equal length (+-1 in the last
    update of an epoch, which has what is left, down to nothing). So each sample comes once an epoch, nothing is
    padded or dropped, every process sees the same number of micro-batches, and any update is found without a replay.

    Accelerate's own sharding pads the last batch with samples that were already used, or gives some processes one
    batch less than others; and it can resume only by skipping through the batches before.

    drop_last: leave a smaller last update out, for BatchNorm, which fails on a piece of one sample.
    repeats: an epoch takes 1/repeats of the samples, each `repeats` times in one update; in `indices`, repetition r
    of sample i is i + r x samples. Source: repeated augmentation, E. Hoffer et al., https://arxiv.org/abs/1901.09335.
    """

    def __init__(
        self,
        labels: torch.Tensor,
        batch_size: int,
        accelerator: Accelerator,
        seed: int | None = None,
        accumulation: int = 1,
        drop_last: bool = False,
        repeats: int = 1,
    ):
        self.labels, self.batch_size, self.seed, self.accumulation = labels, batch_size, seed, accumulation
        self.drop_last, self.repeats = drop_last, repeats
        self.num_processes, self.process_index = accelerator.num_processes, accelerator.process_index

    def __len__(self) -> int:
        """Updates an epoch."""
        return len(self.labels) // self.batch_size if self.drop_last else -(-len(self.labels) // self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample indices of an epoch, int64 (N,)."""
        samples = len(self.labels)
        if self.seed is None:
            return torch.arange(samples)
        # mixed: torch's generator on the CPU looks at the low 32 bits of its seed alone
        generator = torch.Generator().manual_seed(mix_bits(mix_bits(self.seed) + epoch))
        order = torch.randperm(samples, generator=generator)
        if self.repeats > 1:
            updates = order.split(self.batch_size // self.repeats)
            order = torch.cat([part + samples * r for part in updates for r in range(self.repeats)])[:samples]
        return order

    def pieces(self, epoch: int = 0, first_update: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, without images; the first one is of update `first_update`."""
        order = self.order(epoch).to(self.labels.device)
        for update in range(first_update, len(self)):
            samples = order[update * self.batch_size : (update + 1) * self.batch_size]
            pieces = samples.tensor_split(self.accumulation * self.num_processes)
            for indices in pieces[self.process_index :: self.num_processes]:
                rows = indices % len(self.labels) if self.repeats > 1 else indices
                yield Batch(None, self.labels.index_select(0, rows), indices, len(samples))


class GlobalBatches(GlobalSampler):
    """The batches of a GlobalSampler, from images that lie in the memory of the accelerator's device."""

    def __init__(self, data: Images, batch_size: int, accelerator: Accelerator, *sampler_args, **sampler_kwargs):
        super().__init__(data.labels.to(accelerator.device), batch_size, accelerator, *sampler_args, **sampler_kwargs)
        self.images = data.images.to(accelerator.device)

    def epoch(self, epoch: int = 0, first_update: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, `accumulation` for each update from `first_update` on."""
        for piece in self.pieces(epoch, first_update):
            # index_select copies whole images: 5 times faster than images[indices]
            yield piece._replace(images=self.images.index_select(0, piece.indices))


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
