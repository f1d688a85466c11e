"""Image files of any size and kind, decoded when a batch needs them; augmentation by (seed, epoch, sample) alone."""

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageOps
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import v2 as transforms

from utils import stop

EXIF_ORIENTATION = 0x0112


class BadImage(ValueError):
    """A file that is no image, or only a part of one."""


def open_upright(cell: dict) -> Image.Image:
    """The image of a cell {"bytes", "path"} of a `datasets` Image column, not decoded yet if it lies upright."""
    image = Image.open(cell["path"] if cell["bytes"] is None else io.BytesIO(cell["bytes"]))
    return image if image.getexif().get(EXIF_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB; what is transparent becomes white. Raises: ValueError for pixels of unknown range."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits; PIL's own conversion cuts all above 255 off
        return Image.fromarray((np.asarray(image) / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def crop_and_resize(image: Image.Image, box: tuple[float, float, float, float], size: int) -> torch.Tensor:
    """The part `box` (left, top, width, height; in pixels) of an image as uint8 (size, size, 3), bilinear, antialiased.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the part keeps at least `size` pixels: the decoder then does
    less of its inverse transform, and it averages as antialiasing would. torch resizes bytes twice as fast as PIL.
    """
    left, top, width, height = box
    whole_width, whole_height = image.size
    factor = int(min(width, height) // size)
    if factor >= 2:
        image.draft("RGB", (whole_width // factor, whole_height // factor))  # a power of two, never smaller than asked
    x, y = image.size[0] / whole_width, image.size[1] / whole_height
    corners = (left * x, top * y, (left + width) * x, (top + height) * y)
    left, top, right, bottom = (int(corner + 0.5) for corner in corners)
    part = to_rgb(image).crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)[None]
    return F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def center_crop(size: int, resize: int) -> Callable:
    """The middle of an image, as if its shorter side were resized to `resize` and then size x size pixels cut out."""

    def transform(image: Image.Image, key: int) -> torch.Tensor:
        side = size * min(image.size) / resize
        width, height = image.size
        return crop_and_resize(image, ((width - side) / 2, (height - side) / 2, side, side), size)

    return transform


@contextlib.contextmanager
def generator_seeded(key: int):
    """torch's global generator, from which the transforms draw, seeded by `key` in here and unchanged after.

    torch.random.fork_rng and torch.manual_seed do that too, in 190 us instead of 15: they see to all devices.
    """
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(key)
        yield
    finally:
        torch.set_rng_state(before)


def random_augment(
    size: int, min_area: float = 0.08, flip: float = 0.5, trivial_augment: bool = False, erase: float = 0.0
) -> Callable:
    """torchvision's transforms for training, with all random numbers from the sample's own key.

    size: pixels of the square; min_area: smallest share of the image in a crop; flip: probability of a mirror image;
    trivial_augment: one random operation at random strength, https://arxiv.org/abs/2103.10158; erase: probability
    of a rectangle put to the mean colour, https://arxiv.org/abs/1708.04896.
    """
    policy = transforms.TrivialAugmentWide(interpolation=transforms.InterpolationMode.BILINEAR)
    eraser = transforms.RandomErasing(erase, value=[124, 116, 104])

    def transform(image: Image.Image, key: int) -> torch.Tensor:
        with generator_seeded(key):
            top, left, height, width = RandomResizedCrop.get_params(image, (min_area, 1.0), (3 / 4, 4 / 3))
            pixels = crop_and_resize(image, (left, top, width, height), size)
            if torch.rand(()) < flip:
                pixels = pixels.flip(1)
            if trivial_augment:
                pixels = torch.from_numpy(np.array(policy(Image.fromarray(pixels.numpy()))))
            return eraser(pixels.permute(2, 0, 1)).permute(1, 2, 0) if erase else pixels

    return transform


class ImageReader(Dataset):
    """Decodes and transforms the images of a piece, in a worker process. See ImageLoader for the arguments."""

    def __init__(self, split, transform: Callable, seed: int):
        self.split, self.transform, self.seed = split, transform, seed

    def __getitems__(self, epoch_and_indices: tuple[int, list[int]]) -> torch.Tensor:
        epoch, indices = epoch_and_indices
        return torch.stack([self.read(index, epoch) for index in indices])

    def read(self, index: int, epoch: int = 0) -> torch.Tensor:
        """uint8 (H, W, 3). Raises: BadImage, with the file's name or the row's number."""
        row = index % len(self.split.rows)
        cell = self.split.rows[row][self.split.image_column]
        try:
            key = int(np.random.SeedSequence([self.seed, epoch, index]).generate_state(1)[0])
            with open_upright(cell) as image:
                return self.transform(image, key)
        except Exception as error:  # PIL has no common class for what its thirty readers raise
            raise BadImage(f"{cell['path'] or 'the image'} (row {row}) cannot be decoded: {error}") from error

    def is_bad(self, row: int) -> str | None:
        """Why a row cannot be decoded; None if it can."""
        try:
            self.read(row)
        except BadImage as error:
            return str(error)


class ImageLoader:
    """Loads the pieces of a GlobalSampler (utils/data.py) in worker processes, ahead of the training.

    split: has `rows` (a `datasets.Dataset`, not decoded), `image_column` and `dataset`, its name; transform: makes
    uint8 (H, W, 3) from a PIL image and a key, a number of 32 bits that is a function of (seed, epoch, sample).
    num_workers: processes; None: this process's share of the cores, at most 16, but none where the CPU trains: it has
    no core to spare.
    """

    def __init__(self, split, transform: Callable, accelerator: Accelerator, seed: int = 0, num_workers=None):
        self.dataset, self.device = split.dataset, accelerator.device
        self.labels, self.classes = split.labels, split.classes
        if num_workers is None:
            share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            num_workers = 0 if self.device.type == "cpu" else max(1, min(16, share))
        self.queue = []  # filled anew for each epoch, while the workers live on
        self.reader = ImageReader(split, transform, seed)
        self.loader = DataLoader(
            self.reader,
            batch_sampler=self.queue,
            collate_fn=lambda images: images,
            generator=torch.Generator(),  # else it draws a number from the global one for each epoch
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self.device.type == "cuda",
            multiprocessing_context="fork" if num_workers else None,  # shares the memory-mapped table of `datasets`
        )

    def load(self, pieces: Iterable, epoch: int = 0) -> Iterator:
        """The pieces with their images, uint8 (n, 3, H, W) with channels last, and on the device.

        Raises: SystemExit, naming the file, if one cannot be decoded.
        """
        pieces = list(pieces)
        self.queue[:] = [(epoch, piece.indices.tolist()) for piece in pieces]
        try:
            for piece, images in zip(pieces, self.loader, strict=True):
                images, labels, indices = (
                    # pinned, and without waiting: the GPU copies while the CPU goes on
                    tensor.to(self.device, non_blocking=True)
                    for tensor in (images, piece.labels, piece.indices)
                )
                yield piece._replace(images=images.permute(0, 3, 1, 2), labels=labels, indices=indices)
        except BadImage as error:
            reason = str(error).strip().splitlines()[-1].rpartition("BadImage: ")[2]  # behind a worker's traceback
            stop(f"--dataset {self.dataset}: {reason}; --skip_bad_images leaves it out", alone=True)


def without_bad_images(split, accelerator: Accelerator, num_workers: int | None = None):
    """The split without rows that cannot be decoded, and why not: {row: reason}. A collective; reads every image.

    All before the first update: the order of the data is then a permutation of what is left, on any topology.
    """
    reader = ImageReader(split, center_crop(8, 8), seed=0)  # small: a JPEG is read whole, and mostly not transformed
    mine = range(accelerator.process_index, len(split.rows), accelerator.num_processes)
    with ThreadPoolExecutor(num_workers or os.cpu_count()) as pool:
        reasons = zip(mine, pool.map(reader.is_bad, mine), strict=True)
        bad = dict(gather_object([(row, reason) for row, reason in reasons if reason]))
    if not bad:
        return split, bad
    good = [row for row in range(len(split.rows)) if row not in bad]
    return split._replace(rows=split.rows.select(good), labels=split.labels[good]), bad


def fingerprint(*splits) -> str:
    """16 hex digits that change with the number of images, their labels, names and (in parquet files) sizes in bytes.

    Not with their pixels: to read all of a large data set for that takes as long as to train on it.
    """
    import pyarrow.compute

    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.labels.numpy())
        column = split.rows.data.column(split.image_column)
        contents, paths = (pyarrow.compute.struct_field(column, name) for name in ("bytes", "path"))
        sizes = pyarrow.compute.binary_length(contents).fill_null(0)  # from the offsets: no image is read
        digest.update(sizes.to_numpy())
        for path in paths.to_pylist():
            digest.update("/".join(Path(path or "").parts[-2:]).encode() + b"\n")
    return digest.hexdigest()[:16]


class SyntheticLoader:
    """As ImageLoader, but the same random images over and over: what is left is the speed of training alone."""

    def __init__(self, samples: int, size: int, accelerator: Accelerator):
        self.size, self.device = size, accelerator.device
        self.classes = [str(label) for label in range(1000)]
        self.labels = torch.arange(samples) % len(self.classes)
        self.images = {}

    def load(self, pieces: Iterable, epoch: int = 0) -> Iterator:
        for piece in pieces:
            count = len(piece.indices)
            if count not in self.images:
                pixels = torch.randint(256, (count, self.size, self.size, 3), dtype=torch.uint8, device=self.device)
                self.images[count] = pixels.permute(0, 3, 1, 2)
            labels, indices = piece.labels.to(self.device), piece.indices.to(self.device)
            yield piece._replace(images=self.images[count], labels=labels, indices=indices)


def make_loaders(args, splits, accelerator: Accelerator):
    """Loaders of the train and test split, and what run.json and the banner say of the data.

    splits: as ImageLoader takes them, or None for random images. Reads the flags of scripts/resnet50.py from `args`.
    """
    if splits is None:
        train_loader = SyntheticLoader(1_281_167, args.image_size, accelerator)  # as many as ImageNet has
        test_loader = SyntheticLoader(128, args.eval_size, accelerator)
        return train_loader, test_loader, {"dataset": "synthetic", "fingerprint": "synthetic"}
    bad = {}
    if args.skip_bad_images:
        kept = []
        for name, split in zip(("train", "test"), splits, strict=True):
            split, reasons = without_bad_images(split, accelerator, args.num_workers)
            kept.append(split)
            bad |= {f"{name} {row}": reason for row, reason in reasons.items()}
        splits = kept
        for reason in bad.values():
            accelerator.print(f"left out: {reason}")
    transforms = (
        random_augment(args.image_size, args.min_crop, args.flip, args.trivial_augment, args.erase),
        center_crop(args.eval_size, args.eval_resize),
    )
    loaders = [
        ImageLoader(split, transform, accelerator, args.seed, args.num_workers)
        for split, transform in zip(splits, transforms, strict=True)
    ]
    train, test = (len(split.labels) for split in splits)
    data = {"dataset": args.dataset, "train": train, "test": test, "classes": len(splits[0].classes)}
    return *loaders, {**data, "bad_images": len(bad), "fingerprint": fingerprint(*splits)}


def mix(images: torch.Tensor, mixup: float, cutmix: float, seed: int, step: int):
    """Mixup or CutMix of neighbours, sample 2i with 2i + 1: (images, positions of the partners, share of their own).

    images: uint8 (N, 3, H, W), N even; mixup, cutmix: alpha of the Beta distribution, 0: off, both: one or the other.
    One share and one box for an update, a function of (seed, step), as torchvision draws them for a batch. Neighbours,
    and not a permutation of the batch: then a process holds both, however many processes there are. Sources:
    https://arxiv.org/abs/1710.09412, https://arxiv.org/abs/1905.04899.
    """
    partners = torch.arange(len(images), device=images.device)
    if not mixup and not cutmix:
        return images, partners, 1.0
    partners = partners ^ 1
    rng = np.random.default_rng([seed, step])
    if mixup and (not cutmix or rng.random() < 0.5):
        share = rng.beta(mixup, mixup)
        return torch.lerp(images[partners].float(), images.float(), share), partners, share
    height, width = images.shape[2:]
    (y, x), half = rng.random(2), 0.5 * np.sqrt(1 - rng.beta(cutmix, cutmix))
    top, bottom = (int(height * np.clip(y + side, 0, 1)) for side in (-half, half))
    left, right = (int(width * np.clip(x + side, 0, 1)) for side in (-half, half))
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
    return mixed, partners, 1 - (bottom - top) * (right - left) / (height * width)
