"""Decode image files of any format that PIL reads to 8-bit grey or RGB."""

import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import ExifTags, Image, ImageOps

from ..console import stop


def open_upright(cell: dict) -> Image.Image:
    """Open the image of a cell {"bytes", "path"} of a `datasets` Image column, rotated according to its EXIF data.

    It is not decoded yet, unless it is rotated.
    """
    image = Image.open(cell["path"] if cell["bytes"] is None else io.BytesIO(cell["bytes"]))
    if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
        return image
    return ImageOps.exif_transpose(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB; transparent pixels become white.

    Raises:
        ValueError: if the range of the pixels is unknown: floating point, or integers of more than 16 bits.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16 bits, which PIL's conversion would clip at 255
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("its pixels are integers of unknown range")
        return Image.fromarray((pixels / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def to_grey(image: Image.Image) -> Image.Image:
    return image if image.mode == "L" else to_rgb(image).convert("L")


def decode_images(contents: list[bytes | None], paths: list[str | None], dataset: str) -> np.ndarray:
    """Decode image files of one size, with one thread per core.

    Args:
        contents: of each file; None: read the file at its path.
        dataset: the value of --dataset, for messages.

    Returns:
        uint8 (N, C, H, W); C is 1 if all images are grey, else 3.
    """

    def read(row, use):
        """Return `use(image)` of an open image."""
        try:
            with open_upright({"bytes": contents[row], "path": paths[row]}) as image:
                return use(image)
        except Exception as error:  # PIL's readers have no common base class of errors
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{name(row)} cannot be decoded: {reason}") from error

    def name(row):
        return paths[row] or f"the image in row {row}"

    def is_grey(image):  # known from the header, without decoding
        return image.mode in ("1", "L") or image.mode.startswith("I")

    def decode(row):
        convert = to_grey if all_grey else to_rgb
        return read(row, lambda image: np.asarray(convert(image)))

    def decode_into(row):
        image = decode(row)
        if image.shape != first.shape:
            sizes = [f"{shape[1]}x{shape[0]}" for shape in (image.shape, first.shape)]
            raise ValueError(f"{name(row)} has {sizes[0]} pixels and the first image {sizes[1]}: resize them")
        pixels[row] = image

    rows = range(len(contents))
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            all_grey = all(pool.map(lambda row: read(row, is_grey), rows))
            first = decode(0)
            pixels = np.empty((len(contents), *first.shape), np.uint8)
            for _ in pool.map(decode_into, rows):  # raises the errors of the threads
                pass
    except ValueError as error:
        stop(f"--dataset {dataset}: {error}")
    return pixels[:, None] if all_grey else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
