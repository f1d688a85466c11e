"""Image files of all kinds, and augmentation by (seed, epoch, item)."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import fake_accelerator
from PIL import Image, ImageOps
from torchvision import transforms

from scripts import resnet50
from utils.data import image_files as images
from utils.data.images import load_splits
from utils.loader import GlobalLoader

PHOTO = Image.linear_gradient("L").resize((120, 90))
MIRRORED = PHOTO.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
PHOTO = Image.merge("RGB", (PHOTO, MIRRORED, ImageOps.invert(PHOTO)))


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def cell(content: bytes) -> dict:
    return {"bytes": content, "path": "odd.png"}


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # how a phone saves an upright photo
    return encoded(PHOTO.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)


def transparent(mode) -> bytes:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.new("L", PHOTO.size, 0))
    return encoded(image.convert(mode))


GREY = PHOTO.convert("L")
KINDS = {
    "grey jpeg": (encoded(GREY, "JPEG", quality=95), GREY.convert("RGB")),
    "cmyk jpeg": (encoded(PHOTO.convert("CMYK"), "JPEG", quality=95), PHOTO),
    "palette": (encoded(PHOTO.quantize(256)), PHOTO),
    "rotated by exif": (rotated(), PHOTO),
    "transparent": (transparent("RGBA"), Image.new("RGB", PHOTO.size, "white")),
    "transparent grey": (transparent("LA"), Image.new("RGB", PHOTO.size, "white")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_images_become_the_rgb_that_a_person_sees(kind):
    content, expected = KINDS[kind]
    got = images.read_image(cell(content), lambda image: np.asarray(images.to_rgb(image)).astype(int))
    assert got.shape == (*PHOTO.size[::-1], 3)
    assert np.abs(got - np.asarray(expected)).mean() < 6


def split_of(tmp_path):
    for split in ("train", "test"):
        for i, label in enumerate(["cat", "dog"] * 3):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True, exist_ok=True)
            PHOTO.rotate(7 * i).save(folder / f"{i}.png")
    return load_splits(str(tmp_path / "data"))[0]


def center(size, resize=None):
    return resnet50.CenterCrop(SimpleNamespace(eval_size=size, eval_resize=resize or size))


def augment(size, min_crop=0.08, flip=0.5, trivial_augment=False, erase=0.0):
    flags = {"image_size": size, "min_crop": min_crop, "flip": flip, "trivial_augment": trivial_augment, "erase": erase}
    return resnet50.Augment(SimpleNamespace(**flags))


def loader_of(split, transform, batch_size=4, **options):
    dataset = images.ImageFiles(split, transform)
    return GlobalLoader(dataset, batch_size, fake_accelerator(), collate_fn=dataset.collate, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_uint8_in_channels_last_with_their_labels(tmp_path, num_workers):
    split = split_of(tmp_path)
    for batch in loader_of(split, center(8), num_workers=num_workers):
        pixels, labels = batch.data
        assert pixels.dtype == torch.uint8
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, split.labels[batch.indices])
        one, label = images.ImageFiles(split, center(8))[int(batch.indices[1])]
        assert torch.equal(pixels[1], one)
        assert label == labels[1]


@pytest.mark.parametrize(("width", "height", "tolerance"), [(500, 375, 4), (2000, 1500, 5)])
def test_the_middle_is_that_of_torchvision(width, height, tolerance):
    """Also where the JPEG is decoded at a part of its size."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    file = encoded(coarse.resize((width, height), Image.Resampling.BICUBIC), "JPEG", quality=90)
    theirs = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    reference = theirs(Image.open(io.BytesIO(file)))
    image = Image.open(io.BytesIO(file))
    ours = center(224, 256)(image)
    assert (image.size != (width, height)) == (width == 2000)
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(reference)).mean() < tolerance
    assert ours.shape == (3, 224, 224)


@pytest.mark.parametrize("box", [(1600, 0, 16, 16), (0, 1600, 16, 16)])
def test_a_crop_of_a_narrow_jpeg_is_at_its_place(box):
    """Decoded at 1/8 of its size, 17 pixels become 3, and 2000 become 250."""
    grey = np.repeat(np.linspace(0, 250, 2000).astype(np.uint8)[:, None], 17, axis=1)
    file = encoded(Image.fromarray(grey if box[0] else grey.T), "JPEG", quality=95)
    crop = images.crop_and_resize(Image.open(io.BytesIO(file)), box, 2)
    assert crop.float().mean().item() == pytest.approx(1608 / 2000 * 250, abs=3)


def test_a_random_crop_is_that_of_torchvision_with_the_same_numbers():
    image = PHOTO.transpose(Image.Transpose.ROTATE_90).resize((500, 375))  # left and right differ
    torch.manual_seed(7)
    reference = transforms.RandomResizedCrop(64)(image)
    torch.manual_seed(7)
    ours = augment(64, flip=0.0)(image)
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - np.asarray(reference)).mean() < 2
    torch.manual_seed(7)
    mirrored = augment(64, flip=1.0)(image)
    assert torch.equal(mirrored, ours.flip(2))


def test_augmentation_is_a_function_of_seed_epoch_and_item(tmp_path):
    """In any order, with or without workers; and the global generators stay as they were."""
    split = split_of(tmp_path)
    transform = augment(16, 0.2, trivial_augment=True, erase=0.5)
    before = torch.get_rng_state()

    def load(seed=0, epoch=0, **options):
        loader = loader_of(split, transform, seed=seed, **options)
        found = {}
        for batch in loader.epoch(epoch):
            found |= dict(zip(batch.indices.tolist(), batch.data[0].clone(), strict=True))
        return found

    first = load()
    assert sorted(first) == list(range(6))
    for other in (load(num_workers=2), load(batch_size=2), load(batch_size=1, num_workers=1)):
        assert all(torch.equal(first[i], other[i]) for i in range(6))
    for other in (load(seed=1), load(epoch=1)):
        assert sum(torch.equal(first[i], other[i]) for i in range(6)) == 0
    assert torch.equal(torch.get_rng_state(), before)
