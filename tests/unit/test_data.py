import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import MNIST
from PIL import Image

from scripts import mnist_mlp
from utils.data import images as data
from utils.data.files import find_data
from utils.data.image_files import decode_images
from utils.fingerprint import digest


@pytest.fixture(autouse=True)
def _own_cache(home, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def image_folder(root, size=(4, 4), color="L"):
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((*size[::-1], 3) if color == "RGB" else size[::-1], 100 * label + i, np.uint8)
                Image.fromarray(pixels, color).save(root / split / name / f"{i}.png")
    return root


def test_bundled_mnist_has_the_known_counts_and_pixels():
    train, test = data.load_images(str(MNIST))
    images, _ = train.tensors
    assert images.shape == (60000, 1, 28, 28)
    assert test.tensors[0].shape == (10000, 1, 28, 28)
    assert images.dtype == torch.uint8
    # Class counts as published; mean and deviation as the script's constants.
    assert torch.bincount(test.tensors[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert images.double().mean() == pytest.approx(mnist_mlp.MEAN, abs=1e-4)
    assert images.double().std() == pytest.approx(mnist_mlp.STD, abs=1e-4)


def test_pgm_fast_path_equals_pil(small_mnist):
    split = datasets.load_dataset(str(small_mnist))["test"]
    cells = split.data.column("image").to_pylist()
    contents = [cell["bytes"] for cell in cells]
    slow = decode_images(cells)
    assert np.array_equal(data.decode_pgm(contents), slow)
    # PIL decides about files of several sizes, other headers, and files that are missing.
    first = contents[0]
    for other in (first[:-1], first.replace(b"28", b"82", 1), first.replace(b"P5", b"P2"), None):
        assert data.decode_pgm([first, other]) is None
        assert data.decode_pgm([other, first]) is None
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert (data.decode_pgm([b"P5 4 3 255 " + pixels.tobytes()])[0, 0] == pixels).all()  # width before height


@pytest.mark.parametrize(
    ("names", "test"),
    [
        (["train", "validation", "test"], "test"),
        (["val", "train", "unsupervised"], "val"),
        (["train"], None),
    ],
)
def test_the_splits_of_a_hub_dataset_are_used_or_named(monkeypatch, names, test):
    rows = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
    monkeypatch.setattr(datasets, "load_dataset", lambda dataset, cache_dir: rows)
    kind, splits, left_out = find_data("owner/name", {}, "text", None)
    assert kind == "rows"
    assert splits == {"train": rows["train"]} | ({"test": rows[test]} if test else {})
    assert left_out == [f"the split {name}" for name in names if name not in ("train", test)]


def test_mnist_by_its_hub_id_is_the_bundled_one_and_without_that_the_hub_is_asked(monkeypatch, tmp_path, stops):
    monkeypatch.chdir(tmp_path)
    train, _ = data.load_splits("ylecun/mnist")
    assert (train.dataset, len(train.labels)) == ("ylecun/mnist", 60000)
    monkeypatch.setattr(data, "MNIST_FOLDER", tmp_path / "gone")
    said = stops(data.load_splits, "ylecun/mnist")
    assert said.startswith("error: --dataset ylecun/mnist cannot be read as a dataset of the Hub: ")


def test_pgm_and_png_of_the_same_pixels_are_the_same_data(small_mnist, tmp_path):
    """A copy without the bundled files resumes with those of the Hub, which are PNG."""
    pgm = data.decode_split(data.load_splits(str(small_mnist))[1])
    images = [Image.fromarray(image[0].numpy()) for image, _ in pgm]
    for split in ("train", "test"):
        parquet(tmp_path, split, "0123456789", pgm.tensors[1].tolist(), images)
    png = data.decode_split(data.load_splits(str(tmp_path))[1])
    assert digest(png.tensors) == digest(pgm.tensors)


@pytest.mark.parametrize(("color", "channels"), [("L", 1), ("RGB", 3), ("one is L", 3)])
def test_folder_of_images_by_class(tmp_path, color, channels):
    image_folder(tmp_path, (5, 4), "L" if color == "L" else "RGB")
    if color == "one is L":
        Image.new("L", (5, 4)).save(tmp_path / "train" / "cat" / "0.png")
    train, test = data.load_images(str(tmp_path))
    assert train.tensors[0].shape == (6, channels, 4, 5)
    assert train.classes == ["cat", "dog"]
    for image, label in test:
        assert image.flatten()[0] // 100 == label


def parquet(folder, split, names=("cat", "dog"), labels=(0, 1), images=None, dtype="int64"):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value(dtype)})
    if names:
        features["label"] = datasets.ClassLabel(names=list(names))
    images = images or [Image.new("L", (4, 4))] * len(labels)
    # Not as ClassLabel: that would refuse labels out of range itself.
    columns = {"image": images, "label": list(labels)}
    plain = datasets.Features({**features, "label": datasets.Value(dtype)})
    rows = datasets.Dataset.from_dict(columns, features=plain)
    table = rows.data.table.replace_schema_metadata(features.arrow_schema.metadata)
    pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
    return folder


def test_images_of_two_sizes_are_refused(tmp_path, stops):
    """What else is refused is in tests/programs/inputs.py."""
    Image.new("L", (9, 4)).save(image_folder(tmp_path) / "train/dog/2.png")
    assert "has images of 2 sizes" in stops(data.load_images, str(tmp_path))


def test_parquet_files_are_read_without_asking_the_hub(small_mnist, monkeypatch, tmp_path):
    """`datasets` would ask once per call, and wait where there is no network."""
    asked = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **_: asked.append(arguments) or [])
    train, _ = data.load_splits(str(small_mnist), cache_dir=str(tmp_path / "cache"))
    assert not asked
    assert len(train.labels)
    assert list(tmp_path.glob("cache/**/*.arrow"))  # --cache_dir reaches `datasets`


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
def test_labels_without_names_are_integers_of_any_kind(tmp_path, dtype):
    for split in ("train", "test"):
        parquet(tmp_path, split, names=None, labels=(0, 1, 1), dtype=dtype)
    train, _ = data.load_images(str(tmp_path))
    assert train.tensors[1].tolist() == [0, 1, 1]
    assert train.classes == ["0", "1"]
