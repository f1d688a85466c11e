"""Image files of all kinds, and augmentation by (seed, epoch, item)."""

import io
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from fakes import fake_accelerator
from PIL import Image, ImageOps
from torchvision import transforms

from readers import image_files as images
from readers.images_in_memory import load_splits
from utils.failures.errors import explain
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
    "16 bits": (encoded(Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)), GREY.convert("RGB")),
    "transparent": (transparent("RGBA"), Image.new("RGB", PHOTO.size, "white")),
    "transparent grey": (transparent("LA"), Image.new("RGB", PHOTO.size, "white")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_images_become_the_rgb_that_a_person_sees(kind):
    content, expected = KINDS[kind]
    got = images.read_image(cell(content), 0, lambda image: np.asarray(images.to_rgb(image)).astype(int))
    assert got.shape == (*PHOTO.size[::-1], 3)
    assert np.abs(got - np.asarray(expected)).mean() < 6


BAD = {
    "truncated jpeg": encoded(PHOTO, "JPEG")[:-700],
    "empty": b"",
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


def loader_of(split, transform, batch_size=4, **options):
    dataset = images.ImageFiles(split, transform)
    return GlobalLoader(dataset, batch_size, fake_accelerator(), collate_fn=dataset.collate, **options)


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in BAD), ("empty", 1)])
def test_a_bad_file_is_named(tmp_path, capsys, kind, num_workers):
    split = split_of(tmp_path, {kind: BAD[kind]})
    with pytest.raises(SystemExit):
        list(loader_of(split, images.CenterCrop(8, 8), num_workers=num_workers))
    error = capsys.readouterr().err
    assert error.startswith("error: --dataset ")
    assert len(error.splitlines()) == 1
    assert f"cat/{kind}.png" in error


def test_a_full_shared_memory_is_one_sentence(tmp_path):
    def full(image):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    split = split_of(tmp_path, {})
    dataset = images.ImageFiles(split, images.CenterCrop(8, 8))
    loader = GlobalLoader(dataset, 4, fake_accelerator(), collate_fn=full, num_workers=1)
    with pytest.raises(RuntimeError) as raised:
        list(loader)
    assert explain(raised.value).startswith("/dev/shm is full: enlarge it")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_uint8_in_channels_last_with_their_labels(tmp_path, num_workers):
    split = split_of(tmp_path, {})
    assert images.ImageFiles(split, images.CenterCrop(8, 8)).deterministic
    for batch in loader_of(split, images.CenterCrop(8, 8), num_workers=num_workers):
        pixels, labels = batch.data
        assert pixels.dtype == torch.uint8
        assert pixels.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, split.labels[batch.indices])
        one, label = images.ImageFiles(split, images.CenterCrop(8, 8))[int(batch.indices[1])]
        assert torch.equal(pixels[1], one.permute(2, 0, 1))
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
    ours = images.CenterCrop(224, 256)(image)
    assert (image.size != (width, height)) == (width == 2000)
    assert np.abs(ours.numpy().astype(int) - np.asarray(reference)).mean() < tolerance
    assert ours.shape == (224, 224, 3)


@pytest.mark.parametrize("box", [(0, 1600, 16, 16), (1600, 0, 16, 16)])
def test_a_crop_of_a_narrow_jpeg_is_at_its_place(box):
    """Decoded at 1/8 of its size, 17 pixels become 3, and 2000 become 250."""
    grey = np.repeat(np.linspace(0, 250, 2000).astype(np.uint8)[:, None], 17, axis=1)
    file = encoded(Image.fromarray(grey if box[1] else grey.T), "JPEG", quality=95)
    crop = images.crop_and_resize(Image.open(io.BytesIO(file)), box, 2)
    assert crop.float().mean().item() == pytest.approx(1608 / 2000 * 250, abs=3)


def test_a_random_crop_is_that_of_torchvision_with_the_same_numbers():
    image = PHOTO.resize((500, 375))
    torch.manual_seed(7)
    reference = transforms.RandomResizedCrop(64)(image)
    torch.manual_seed(7)
    ours = images.RandomAugment(64, flip=0.0)(image)
    assert np.abs(ours.numpy().astype(int) - np.asarray(reference)).mean() < 2
    torch.manual_seed(7)
    mirrored = images.RandomAugment(64, flip=1.0)(image)
    assert torch.equal(mirrored, ours.flip(1))


def test_augmentation_is_a_function_of_seed_epoch_and_item(tmp_path):
    """In any order, with or without workers; and the global generators stay as they were."""
    split = split_of(tmp_path, {})
    augment = images.RandomAugment(16, 0.2, trivial_augment=True, erase=0.5)
    before = torch.get_rng_state()

    def load(seed=0, epoch=0, **options):
        loader = loader_of(split, augment, seed=seed, **options)
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


@pytest.mark.parametrize(("device", "workers"), [("cpu", 0), ("cuda", 6)])
def test_the_processes_of_a_machine_share_its_cores(monkeypatch, device, workers):
    monkeypatch.setattr(images, "share_of_cores", lambda: 6)
    assert images.default_num_workers(fake_accelerator(device=device)) == workers


def fingerprint_of(split):
    return images.ImageFiles(split, images.CenterCrop(8, 8)).fingerprint


def test_fingerprint_of_files(tmp_path):
    base = fingerprint_of(split_of(tmp_path / "a", {}))
    assert fingerprint_of(split_of(tmp_path / "b", {})) == base  # the folder may move
    assert fingerprint_of(split_of(tmp_path / "c", {"more": encoded(PHOTO)})) != base
    named = [split_of(tmp_path / name, {name: encoded(PHOTO)}) for name in ("x", "y")]
    assert fingerprint_of(named[0]) != fingerprint_of(named[1])
    split = split_of(tmp_path / "d", {})
    (tmp_path / "d" / "data" / "train" / "cat" / "0.png").write_bytes(encoded(GREY))
    assert fingerprint_of(split) != base  # an image was overwritten by another
    transform = images.CenterCrop(8, 8)
    assert loader_of(split, transform).describe()["fingerprint"] == fingerprint_of(split)


def table_of(cells, labels):
    rows = datasets.Dataset.from_dict({"image": cells, "label": labels})
    rows = rows.cast_column("image", datasets.Image(decode=False))
    return SimpleNamespace(rows=rows, image_column="image", labels=torch.tensor(labels), classes=["cat", "dog"])


def test_fingerprint_of_a_table(tmp_path):
    photo, grey = cell(encoded(PHOTO)), cell(encoded(GREY))
    tables = [
        table_of([photo, grey], [0, 1]),
        table_of([photo, grey], [1, 0]),
        table_of([grey, grey], [0, 1]),
        table_of([photo, grey, grey], [0, 1, 1]),
        table_of([photo, {"bytes": None, "path": "no/such/file/odd.png"}], [0, 1]),
    ]
    assert len({fingerprint_of(table) for table in tables}) == len(tables)
    assert fingerprint_of(table_of([photo, grey], [0, 1])) == fingerprint_of(tables[0])
