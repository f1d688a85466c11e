"""Image files of any size and format, decoded and randomly augmented when they are read."""

import functools
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import v2 as transforms

from utils.items import UnreadableItem
from utils.launched import share_of_cores

from .image_decoding import read_image, to_rgb

MEAN_COLOUR = (124, 116, 104)  # of ImageNet, RGB


def crop_and_resize(image: Image.Image, box: tuple[float, float, float, float], size: int) -> torch.Tensor:
    """Crop `box` (left, top, width, height; in pixels) and resize it, bilinear, to RGB, uint8 (size, size, 3).

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the crop then still has `size` pixels: this skips a part of the
    inverse transform, and averages pixels as antialiasing would. torch resizes uint8 images twice as fast as PIL.
    """
    left, top, width, height = box
    whole_width, whole_height = image.size
    factor = max(int(min(width, height) // size), 1)
    # The decoder uses a power of two that gives at least the requested size.
    image.draft("RGB", (whole_width // factor, whole_height // factor))
    x_scale = image.size[0] / whole_width
    y_scale = image.size[1] / whole_height
    first_column = int(left * x_scale + 0.5)
    first_row = int(top * y_scale + 0.5)
    last_column = max(int((left + width) * x_scale + 0.5), first_column + 1)
    last_row = max(int((top + height) * y_scale + 0.5), first_row + 1)
    part = np.array(to_rgb(image).crop((first_column, first_row, last_column, last_row)))
    inputs = torch.from_numpy(part).permute(2, 0, 1)[None]
    resized = F.interpolate(inputs, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0)


class CenterCrop:
    """Resize the shorter side of an image to `resize`, then crop (size, size) from the center."""

    deterministic = True

    def __init__(self, size: int, resize: int):
        self.size, self.resize = size, resize

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """A PIL image to uint8 (size, size, 3)."""
        side = self.size * min(image.size) / self.resize
        width, height = image.size
        box = ((width - side) / 2, (height - side) / 2, side, side)
        return crop_and_resize(image, box, self.size)


class RandomAugment:
    """torchvision's transforms for training, which draw from torch's global generator.

    Args:
        size: height and width of the result, in pixels.
        min_area: smallest area of a crop, as a fraction of the image.
        flip: probability of a horizontal flip.
        trivial_augment: apply one random operation at a random strength. Source: https://arxiv.org/abs/2103.10158.
        erase: probability of filling a rectangle with the mean colour. Source: https://arxiv.org/abs/1708.04896.
    """

    def __init__(
        self, size: int, min_area: float = 0.08, flip: float = 0.5, trivial_augment: bool = False, erase: float = 0.0
    ):
        self.size, self.min_area, self.flip = size, min_area, flip
        bilinear = transforms.InterpolationMode.BILINEAR
        self.policy = transforms.TrivialAugmentWide(interpolation=bilinear) if trivial_augment else None
        self.eraser = transforms.RandomErasing(erase, value=list(MEAN_COLOUR)) if erase else None

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """A PIL image to uint8 (size, size, 3)."""
        top, left, height, width = RandomResizedCrop.get_params(image, (self.min_area, 1.0), (3 / 4, 4 / 3))
        pixels = crop_and_resize(image, (left, top, width, height), self.size)
        if torch.rand(()) < self.flip:
            pixels = pixels.flip(1)
        if self.policy is not None:
            pixels = torch.from_numpy(np.array(self.policy(Image.fromarray(pixels.numpy()))))
        if self.eraser is not None:
            pixels = self.eraser(pixels.permute(2, 0, 1)).permute(1, 2, 0)
        return pixels


class ImageFiles(Dataset):
    """A map-style dataset whose images are decoded when they are read; an item is (uint8 (H, W, 3), label).

    Args:
        split: a Split of images_in_memory.
        transform: turns a PIL image into a uint8 tensor (H, W, 3). It may draw from the global generators of torch,
            Python and NumPy, which GlobalLoader seeds for each item, unless it has `deterministic = True`.
    """

    def __init__(self, split, transform):
        self.split, self.transform, self.classes = split, transform, split.classes
        self.deterministic = getattr(transform, "deterministic", False)

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            return read_image(self._cell(index), index, self.transform), int(self.split.labels[index])
        except ValueError as error:  # names the file
            raise UnreadableItem(f"--dataset {self.split.dataset}: {error}") from error

    def _cell(self, index: int) -> dict:
        return self.split.rows[int(index)][self.split.image_column]

    def source(self, index: int) -> bytes:
        """The file of an image."""
        cell = self._cell(index)
        return Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]

    @staticmethod
    def collate(items: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Images, uint8 (N, 3, H, W) in channels_last, and labels, int64 (N,)."""
        images, labels = default_collate(items)
        return [images.permute(0, 3, 1, 2), labels]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the labels and the images' names and sizes in bytes; reading all pixels would take an epoch."""
        digest = hashlib.sha256(self.split.labels.numpy())
        if own := getattr(self.split.rows, "fingerprint", None):  # TarFiles
            return f"{own[:8]}{digest.hexdigest()[:8]}"
        import pyarrow.compute

        column = self.split.rows.data.column(self.split.image_column)
        contents, paths = (pyarrow.compute.struct_field(column, name) for name in ("bytes", "path"))
        sizes = pyarrow.compute.binary_length(contents)  # from the offsets in the table, without reading an image
        for path, size in zip(paths.to_pylist(), sizes.to_pylist(), strict=True):
            if size is None and os.path.isfile(path or ""):  # else reading the image will report it
                size = os.path.getsize(path)
            digest.update(f"{(path or '').split('/')[-2:]} {size}\n".encode())
        return digest.hexdigest()[:16]


def default_num_workers(accelerator: Accelerator) -> int:
    """Worker processes for ImageFiles: this process's share of the cores, at most 16; 0 when training on the CPU."""
    return 0 if accelerator.device.type == "cpu" else min(16, share_of_cores())
