"""Images of any size and format, decoded and cropped when they are read."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from ..console import stop
from ..items import UnreadableItem, stop_at_unreadable_items
from ..launched import share_of_cores
from .files import find_split

EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # modes of Pillow


def list_images(dataset: str, splits: dict[str, dict[str, str]]) -> dict:
    """The splits of a folder of images as train/<class>/<file> and test/<class>/<file>, each a `datasets.Dataset`.

    `datasets.load_dataset` makes the same rows, but takes 20 minutes for a million images, in each process and at each
    start, and passes over AVIF and others without a word.
    """
    import datasets

    names = [name for files in splits.values() for name in files]
    for name in names:
        if name.count("/") != find_split(dataset, name)[1] + 2:
            stop(f"--dataset {dataset}: {name} is not in a folder of its class, such as train/dog/1.jpg: move it")
        # A caption or a list beside the images would else be found when it is decoded, after hours.
        if (suffix := Path(name).suffix.lower()) and suffix not in Image.registered_extensions():
            stop(f"--dataset {dataset}: {name} is not an image that Pillow opens: convert it, or remove it")
    classes = datasets.ClassLabel(names=sorted({name.split("/")[-2] for name in names}))
    features, rows = datasets.Features(image=datasets.Value("string"), label=classes), {}
    for split, files in splits.items():
        paths = sorted(files.values())
        columns = {"image": paths, "label": classes.str2int([path.split("/")[-2] for path in paths])}
        # Paths are strings at first: of images, `datasets` would look at each.
        rows[split] = datasets.Dataset.from_dict(columns, features).cast_column("image", datasets.Image())
    return rows


def read_image(cell: dict, use: Callable):
    """`use(image)` of the image in a cell {"bytes", "path"}, upright; if it is not rotated, not decoded yet."""
    try:
        with Image.open(cell["path"] if cell["bytes"] is None else io.BytesIO(cell["bytes"])) as image:
            is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1  # phones turn by EXIF
            return use(image if is_upright else ImageOps.exif_transpose(image))  # which decodes all of it
    except Exception as error:  # Pillow's readers have no common base class of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableItem(f"--dataset: {cell['path'] or 'an image'} cannot be decoded: {reason}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode with 8 bits as RGB; transparent pixels become white, as on a page."""
    if image.mode not in EIGHT_BITS:  # Pillow would clip them at 255
        raise ValueError(f"its pixels, of Pillow's mode {image.mode}, have more than 8 bits: save it with 8")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_images(cells: list[dict]) -> np.ndarray:
    """Decode images of one size to uint8 (N, C, H, W); C is 1 if all are grey, else 3."""

    def decode(cell: dict) -> np.ndarray:
        return read_image(cell, lambda image: np.asarray(image.convert("L") if image.mode in "1L" else to_rgb(image)))

    with stop_at_unreadable_items(), ThreadPoolExecutor(share_of_cores()) as pool:
        images = [image[None] if image.ndim == 2 else image.transpose(2, 0, 1) for image in pool.map(decode, cells)]
    if len(shapes := {image.shape[1:] for image in images}) > 1:
        stop(f"--dataset has images of {len(shapes)} sizes, height x width, such as {[*shapes][:4]}: resize them")
    channels = max(map(len, images))
    return np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images])


def crop_and_resize(image: Image.Image, box: tuple[float, float, float, float], size: int) -> torch.Tensor:
    """Crop `box` (top, left, height, width; in pixels) and resize it, bilinear, to RGB, uint8 (3, size, size).

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the crop then still has `size` pixels: this skips a part of the
    inverse transform, and averages pixels as antialiasing would. torch resizes uint8 images twice as fast as PIL.
    """
    top, left, height, width = box
    whole_width, whole_height = image.size
    factor = max(int(min(width, height) // size), 1)
    # The decoder uses a power of two that gives at least the requested size.
    image.draft("RGB", (whole_width // factor, whole_height // factor))
    x_scale, y_scale = image.size[0] / whole_width, image.size[1] / whole_height
    first_column, first_row = int(left * x_scale + 0.5), int(top * y_scale + 0.5)
    last_column = max(int((left + width) * x_scale + 0.5), first_column + 1)
    last_row = max(int((top + height) * y_scale + 0.5), first_row + 1)
    part = np.array(to_rgb(image).crop((first_column, first_row, last_column, last_row)))
    inputs = torch.from_numpy(part).permute(2, 0, 1)[None]
    return F.interpolate(inputs, (size, size), mode="bilinear", antialias=True)[0]


class ImageFiles(Dataset):
    """A map-style dataset whose images are decoded when they are read; an item is (transform(image), label).

    `transform` turns a PIL image, which is not decoded yet, into a uint8 tensor (3, H, W), as `crop_and_resize` does.
    Unless it is `deterministic`, GlobalLoader seeds the global generators of torch, Python and NumPy for each item.
    """

    def __init__(self, split, transform: Callable, deterministic: bool = False):
        self.split, self.transform, self.classes, self.deterministic = split, transform, split.classes, deterministic
        self.fingerprint = getattr(split.rows, "fingerprint", None)  # of TarFiles; else GlobalLoader makes one

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return read_image(self._cell(index), self.transform), int(self.split.labels[index])

    def _cell(self, index: int) -> dict:
        return self.split.rows[int(index)][self.split.image_column]

    def source(self, index: int) -> tuple[bytes, int]:
        """The file and the label, for the fingerprint: another version of Pillow may decode other pixels."""
        cell = self._cell(index)
        return cell["bytes"] or Path(cell["path"]).read_bytes(), int(self.split.labels[index])

    @staticmethod
    def collate(items: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Images, uint8 (N, 3, H, W) in channels_last, and labels, int64 (N,)."""
        images, labels = default_collate([(image.permute(1, 2, 0), label) for image, label in items])
        return [images.permute(0, 3, 1, 2), labels]
