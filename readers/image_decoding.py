"""Decode image files of any format that PIL reads to 8-bit grey or RGB."""

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from utils.console import stop
from utils.launched import share_of_cores


def open_upright(cell: dict) -> Image.Image:
    """Open the image of a cell {"bytes", "path"} of a `datasets` Image column, rotated according to its EXIF data.

    It is not decoded yet, unless it is rotated.
    """
    image = Image.open(cell["path"] if cell["bytes"] is None else io.BytesIO(cell["bytes"]))
    if image.format == "TIFF":
        image.info["bits"] = image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))[0]
    if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
        return image
    return ImageOps.exif_transpose(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB; transparent pixels become white.

    Raises:
        ValueError: if the range of the pixels is unknown: floating point, integers of more than 16 bits, or none of
            which uses the upper 15/16 of the range, such as 12 bits that are stored in 16.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # up to 16 bits, which PIL's conversion would clip at 255
        pixels, largest = np.asarray(image), 2 ** image.info.get("bits", 16) - 1
        if largest > 65535 or pixels.min() < 0 or pixels.max() > largest or 0 < pixels.max() <= largest // 16:
            raise ValueError(f"its pixels are integers of unknown range, up to {pixels.max()}: save it with 8 bits")
        return Image.fromarray((pixels * (255 / largest)).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def read_image(cell: dict, row: int, use: Callable):
    """`use(image)` of the image in a cell.

    Raises:
        ValueError: with the name of the file, if it cannot be decoded.
    """
    try:
        with open_upright(cell) as image:
            return use(image)
    except Exception as error:  # PIL's readers have no common base class of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{cell['path'] or 'the image'} (row {row}) cannot be decoded: {reason}") from error


def grey_or_rgb(image: Image.Image) -> np.ndarray:
    """The pixels, uint8 (1, H, W) or (3, H, W)."""
    if image.mode in ("1", "L") or image.mode.startswith("I"):
        return np.asarray(to_rgb(image).convert("L"))[None]
    return np.asarray(to_rgb(image)).transpose(2, 0, 1)


def decode_images(cells: list[dict], dataset: str) -> np.ndarray:
    """Decode images of one size to uint8 (N, C, H, W); C is 1 if all are grey, else 3.

    Args:
        dataset: the value of --dataset, for messages.
    """
    try:
        with ThreadPoolExecutor(share_of_cores()) as pool:
            images = list(pool.map(lambda row: read_image(cells[row], row, grey_or_rgb), range(len(cells))))
    except ValueError as error:
        stop(f"--dataset {dataset}: {error}")
    for row, image in enumerate(images):
        if image.shape[1:] != images[0].shape[1:]:
            sizes = [f"{shape[2]}x{shape[1]}" for shape in (image.shape, images[0].shape)]
            name = cells[row]["path"] or f"the image in row {row}"
            stop(f"--dataset {dataset}: {name} has {sizes[0]} pixels and the first image {sizes[1]}: resize them")
    channels = max(len(image) for image in images)
    return np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images])
