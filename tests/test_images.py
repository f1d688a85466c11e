"""Image files of all kinds, and augmentation that is a function of (seed, epoch, sample)."""

import io
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms

from utils import images
from utils.data import Batch, GlobalSampler, load_splits

ONE = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0)
PHOTO = Image.linear_gradient("L").resize((120, 90))
PHOTO = Image.merge("RGB", (PHOTO, PHOTO.transpose(Image.Transpose.FLIP_LEFT_RIGHT), ImageOps.invert(PHOTO)))


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def cell(content: bytes) -> dict:
    return {"bytes": content, "path": "odd.png"}


def rotated() -> bytes:
    exif = Image.Exif()
    exif[images.EXIF_ORIENTATION] = 6  # how a phone saves an upright photo
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
    "one bit": (encoded(GREY.convert("1")), GREY.convert("1").convert("RGB")),
    "rotated by exif": (rotated(), PHOTO),
    "16 bits": (encoded(Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)), GREY.convert("RGB")),
    "transparent": (transparent("RGBA"), Image.new("RGB", PHOTO.size, "white")),
    "transparent grey": (transparent("LA"), Image.new("RGB", PHOTO.size, "white")),
    "gif": (encoded(PHOTO.quantize(256), "GIF"), PHOTO),
    "webp": (encoded(PHOTO, "WEBP", lossless=True), PHOTO),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_images_become_the_rgb_that_a_person_sees(kind):
    content, expected = KINDS[kind]
    with images.open_upright(cell(content)) as image:
        assert image.size == PHOTO.size
        got = np.asarray(images.to_rgb(image)).astype(int)
    assert np.abs(got - np.asarray(expected)).mean() < 6


BAD = {
    "truncated jpeg": encoded(PHOTO, "JPEG")[:-700],
    "truncated png": encoded(PHOTO)[:-300],
    "empty": b"",
    "text": b"<html>404</html>",
    "float": encoded(PHOTO.convert("F"), "TIFF"),
}


def split_of(tmp_path, contents: dict):
    """A folder of images in which the names of `contents` stand among good ones."""
    for split in ("train", "test"):
        for i, label in enumerate(["cat", "dog"] * 3):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True, exist_ok=True)
            PHOTO.rotate(7 * i).save(folder / f"{i}.png")
    for name, content in contents.items():
        (tmp_path / "data" / "train" / "cat" / f"{name}.png").write_bytes(content)
    return load_splits(str(tmp_path / "data"))[0]


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in BAD), ("empty", 1)])
def test_a_bad_file_is_named(tmp_path, capsys, kind, num_workers):
    split = split_of(tmp_path, {kind: BAD[kind]})
    sampler = GlobalSampler(split.labels, 4, ONE)
    loader = images.ImageLoader(split, images.center_crop(8, 8), ONE, num_workers=num_workers)
    with pytest.raises(SystemExit):
        list(loader.load(sampler.pieces()))
    error = capsys.readouterr().err
    assert error.startswith("error: --dataset ")
    assert len(error.splitlines()) == 1
    assert f"cat/{kind}.png" in error
    assert "--skip_bad_images" in error


def test_bad_files_are_left_out_and_told(tmp_path):
    split = split_of(tmp_path, BAD)
    kept, bad = images.without_bad_images(split, ONE)
    assert len(split.labels) == 6 + len(BAD)
    assert len(kept.labels) == len(kept.rows) == 6
    assert sorted(kept.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    for kind in BAD:
        assert any(f"cat/{kind}.png" in reason for reason in bad.values())
    loader = images.ImageLoader(kept, images.center_crop(8, 8), ONE)
    batches = list(loader.load(GlobalSampler(kept.labels, 4, ONE).pieces()))
    assert [tuple(batch.images.shape) for batch in batches] == [(4, 3, 8, 8), (2, 3, 8, 8)]


@pytest.mark.parametrize(("width", "height", "tolerance"), [(500, 375, 4), (2000, 1500, 5)])
def test_the_middle_is_that_of_torchvision(width, height, tolerance):
    """Also where the JPEG is decoded at a part of its size."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    file = encoded(coarse.resize((width, height), Image.Resampling.BICUBIC), "JPEG", quality=90)
    reference = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])(Image.open(io.BytesIO(file)))
    image = Image.open(io.BytesIO(file))
    ours = images.center_crop(224, 256)(image, 0)
    assert (image.size != (width, height)) == (width == 2000)
    assert np.abs(ours.numpy().astype(int) - np.asarray(reference)).mean() < tolerance
    assert ours.shape == (224, 224, 3)


def test_a_random_crop_is_that_of_torchvision_with_the_same_numbers():
    image = PHOTO.resize((500, 375))
    torch.manual_seed(7)
    reference = transforms.RandomResizedCrop(64)(image)
    ours = images.random_augment(64, flip=0.0)(image, 7)
    assert np.abs(ours.numpy().astype(int) - np.asarray(reference)).mean() < 2
    mirrored = images.random_augment(64, flip=1.0)(image, 7)
    assert torch.equal(mirrored, ours.flip(1))


def test_augmentation_is_a_function_of_seed_epoch_and_sample(tmp_path):
    """In any order, in workers or not; and torch's generator stays as it was."""
    split = split_of(tmp_path, {})
    augment = images.random_augment(16, 0.2, trivial_augment=True, erase=0.5)
    before = torch.get_rng_state()

    def load(num_workers, seed=0, epoch=0, order=range(6)):
        loader = images.ImageLoader(split, augment, ONE, seed, num_workers)
        pieces = [Batch(None, torch.zeros(2), torch.tensor(order[start : start + 2]), 2) for start in (0, 2, 4)]
        batches = list(loader.load(pieces, epoch))
        return {int(i): image for batch in batches for i, image in zip(batch.indices, batch.images, strict=True)}

    first = load(0)
    for other in (load(2), load(0, order=[5, 0, 3, 1, 4, 2])):
        assert all(torch.equal(first[i], other[i]) for i in range(6))
    for other in (load(0, seed=1), load(0, epoch=1)):
        assert sum(torch.equal(first[i], other[i]) for i in range(6)) == 0
    again = load(0, order=[6, 7, 8, 9, 10, 11])  # a second copy of the same samples, augmented otherwise
    assert sum(torch.equal(first[i], again[i + 6]) for i in range(6)) == 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_does_not_depend_on_how_the_batch_is_cut(mixup, cutmix):
    pixels = torch.randint(256, (8, 3, 20, 20), dtype=torch.uint8)
    kinds = set()
    for step in range(8):
        whole, partners, share = images.mix(pixels, mixup, cutmix, 3, step)
        assert partners.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
        for start in (0, 4):
            part, _, same = images.mix(pixels[start : start + 4], mixup, cutmix, 3, step)
            assert torch.equal(part, whole[start : start + 4])
            assert same == share
        kinds.add(whole.dtype)
        if whole.dtype == torch.uint8:  # CutMix: the share is that of the pixels
            own = (whole == pixels).all(1).double().mean()
            assert float(own) == pytest.approx(share, abs=0.01)
        else:
            expected = share * pixels.float() + (1 - share) * pixels[partners].float()
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-3)
    assert len(kinds) == 1 + bool(mixup and cutmix)


def test_repeats_and_drop_last():
    labels = torch.arange(103) % 10
    sampler = GlobalSampler(labels, 12, ONE, seed=0, drop_last=True, repeats=3)
    pieces = list(sampler.pieces(5))
    assert len(pieces) == len(sampler) == 103 // 12
    for piece in pieces:
        samples, counts = torch.unique(piece.indices % 103, return_counts=True)
        assert len(samples) == 4
        assert counts.tolist() == [3, 3, 3, 3]
        assert torch.equal(piece.labels, labels[piece.indices % 103])
        assert len(set(piece.indices.tolist())) == 12  # each copy has a number, and so an augmentation, of its own
        assert not (piece.indices[::2] % 103 == piece.indices[1::2] % 103).any()  # mixup finds another image
    seen = torch.cat([piece.indices % 103 for piece in pieces]).unique()
    assert len(seen) == 4 * len(pieces)


def test_fingerprint_of_files(tmp_path):
    base = images.fingerprint(split_of(tmp_path / "a", {}))
    assert images.fingerprint(split_of(tmp_path / "b", {})) == base  # the folder may move
    assert images.fingerprint(split_of(tmp_path / "c", {"more": encoded(PHOTO)})) != base
    table = {"image": [cell(encoded(PHOTO)), cell(encoded(GREY))], "label": [0, 1]}
    rows = datasets.Dataset.from_dict(table).cast_column("image", datasets.Image(decode=False))
    one = SimpleNamespace(rows=rows, image_column="image", labels=torch.tensor([0, 1]))
    other = SimpleNamespace(rows=rows, image_column="image", labels=torch.tensor([1, 0]))
    assert images.fingerprint(one) != images.fingerprint(other)
