import os
import shutil

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import MNIST
from PIL import Image

from readers import images_in_memory as data
from readers.hub import load_dataset
from readers.image_decoding import decode_images
from utils.fingerprint import digest


@pytest.fixture(autouse=True)
def _own_cache(home, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def image_folder(root, size=(4, 4), color="L", splits=("train", "test"), suffix="png"):
    for split in splits:
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((*size[::-1], 3) if color == "RGB" else size[::-1], 100 * label + i, np.uint8)
                Image.fromarray(pixels, color).save(root / split / name / f"{i}.{suffix}")
    return root


def test_bundled_mnist_has_the_known_counts_and_pixels():
    train, test = data.load_images(str(MNIST))
    images, _ = train.tensors
    assert images.shape == (60000, 1, 28, 28)
    assert test.tensors[0].shape == (10000, 1, 28, 28)
    assert images.dtype == torch.uint8
    # Class counts as published; mean and deviation as the script's constants.
    assert torch.bincount(test.tensors[1]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert images.double().mean() == pytest.approx(33.3184, abs=1e-4)
    assert images.double().std() == pytest.approx(78.5675, abs=1e-4)


def test_pgm_fast_path_equals_pil(small_mnist):
    split = datasets.load_dataset(str(small_mnist))["test"]
    cells = split.data.column("image").to_pylist()
    contents = [cell["bytes"] for cell in cells]
    slow = decode_images(cells, "x")
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
        (["train", "dev"], "dev"),
        (["train"], None),
    ],
)
def test_the_splits_of_a_hub_dataset_are_used_or_named(monkeypatch, names, test):
    rows = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names}
    monkeypatch.setattr(datasets, "load_dataset", lambda dataset: rows)
    splits, left_out = load_dataset("owner/name", "an/example")
    assert splits == {"train": rows["train"]} | ({"test": rows[test]} if test else {})
    assert left_out == [f"the split {name}" for name in names if name not in ("train", test)]


def test_mnist_by_its_hub_id_is_the_bundled_one_and_without_that_the_hub_is_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    train, _ = data.load_splits("ylecun/mnist")
    assert (train.dataset, len(train.labels)) == ("ylecun/mnist", 60000)
    monkeypatch.setattr(data, "MNIST_FOLDER", tmp_path / "gone")
    with pytest.raises(SystemExit):
        data.load_splits("ylecun/mnist")
    sentence = "error: --dataset ylecun/mnist is not a folder, and cannot be loaded from the Hub: "
    assert capsys.readouterr().err.startswith(sentence)


def test_pgm_and_png_of_the_same_pixels_are_the_same_data(small_mnist, tmp_path):
    """A copy without the bundled files resumes with those of the Hub, which are PNG."""
    pgm = data.decode_split(data.load_splits(str(small_mnist))[1])
    images = [Image.fromarray(image[0].numpy()) for image, _ in pgm]
    for split in ("train", "test"):
        parquet(tmp_path, split, "0123456789", pgm.tensors[1].tolist(), images)
    png = data.decode_split(data.load_splits(str(tmp_path))[1])
    assert digest(png.tensors) == digest(pgm.tensors)


def test_images_in_memory_are_upright(tmp_path):
    image_folder(tmp_path, (4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # as a phone saves an upright photo
    sideways = Image.fromarray(np.repeat(np.array([[0, 0, 255, 255]], np.uint8), 4, axis=0))
    sideways.save(tmp_path / "train" / "cat" / "0.png", exif=exif)
    pixels = data.load_images(str(tmp_path))[0].images[0, 0]
    assert pixels[:, 0].tolist() == pixels[:, 3].tolist() == [0, 0, 255, 255]


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


def move(root, old, new):
    (root / new).parent.mkdir(parents=True, exist_ok=True)
    (root / old).rename(root / new)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: None,
        lambda root: (root / "README.md").write_text("about"),
        lambda root: (root / "train" / "cat" / ".hidden").write_text("no image"),
        lambda root: move(root, "train/cat/0.png", "train/cat-like/10.PNG"),  # sorted before cat/ as a path
        lambda root: move(root, "test", "validation"),
        lambda root: (root / "test" / "empty").mkdir(),
    ],
)
def test_a_folder_of_images_is_listed_as_datasets_does(tmp_path, monkeypatch, change):
    root = image_folder(tmp_path / "images")
    change(root)
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", None)
        ours = data.load_splits(str(root))
    others = datasets.load_dataset(str(root))
    for mine, theirs in zip(ours, (others["train"], others.get("test", others.get("validation"))), strict=True):
        assert mine.classes == theirs.features["label"].names
        assert mine.labels.tolist() == theirs["label"]
        paths = theirs.cast_column("image", datasets.Image(decode=False))["image"]
        assert [row["image"]["path"] for row in mine.rows] == [row["path"] for row in paths]


def test_a_validation_split_is_the_test_where_there_is_no_other(tmp_path):
    folder = image_folder(tmp_path, splits=("train", "validation", "test"))
    (folder / "test" / "cat" / "0.png").unlink()
    _, test = data.load_images(str(folder))
    assert len(test) == 5
    shutil.rmtree(folder / "test")
    _, test = data.load_images(str(folder))
    assert len(test) == 6


def bad_missing(folder):
    return folder / "nowhere", "neither a folder nor a Hub id"


def bad_hub_id(folder):
    return "no-such-owner/no-such-data", "cannot be loaded from the Hub"


def bad_empty(folder):
    return folder, "has no names of splits; it needs train and one of"


def bad_no_test(folder):
    return image_folder(folder, splits=("train",)), "it needs train and one of"


def bad_file(folder):
    image_folder(folder)
    (folder / "train" / "cat" / "1.png").write_bytes(b"not an image")
    return folder, "1.png (row 1) cannot be decoded"


def bad_size(folder):
    image_folder(folder)
    Image.new("L", (9, 4)).save(folder / "train" / "dog" / "2.png")
    return folder, "2.png has 9x4 pixels and the first image 4x4"


def bad_shapes(folder):
    image_folder(folder)
    for path in (folder / "test").rglob("*.png"):
        Image.new("RGB", (4, 4)).save(path)
    return folder, "test images of (3, 4, 4)"


def bad_class(folder):
    image_folder(folder)
    (folder / "test" / "cat").rename(folder / "test" / "Cat")  # sorts before the other names
    return folder, "has the label 0 in test, but not in train"


def bad_link(folder):
    image_folder(folder)
    (folder / "train" / "cat" / "owl").symlink_to(folder / "train")
    return folder, "cat/owl, that leads back to itself"


def bad_link_to_nothing(folder):
    image_folder(folder)
    (folder / "train" / "cat" / "owl.png").symlink_to(folder / "gone.png")
    return folder, "cat/owl.png is not a file, or a link to nothing"


def bad_metadata(folder):
    image_folder(folder)
    (folder / "train" / "metadata.csv").write_text("file_name,label\ncat/0.png,1\n")
    return folder, "train/metadata.csv is not in a folder of its class"


def bad_place(folder):
    move(image_folder(folder), "train/cat/0.png", "train/0.png")
    return folder, "train/0.png is not in a folder of its class"


def bad_depth(folder):
    move(image_folder(folder), "train/cat/0.png", "train/cat/small/0.png")
    return folder, "train/cat/small/0.png is not in a folder of its class"


def bad_split(folder):
    move(image_folder(folder), "train/cat/0.png", "more/cat/0.png")
    return folder, "and that of more/cat/0.png does not"


def bad_kind(folder):
    image_folder(folder)
    (folder / "train" / "cat" / "1.heic").write_bytes(b"\0\0\0\x18ftypheic")
    return folder, "cat/1.heic is not an image that Pillow opens"


def bad_name(folder):
    image_folder(folder)
    (folder / "train" / "cat" / os.fsdecode(b"\xff.png")).write_bytes((folder / "train/cat/0.png").read_bytes())
    return folder, "\\udcff.png', whose name is not UTF-8"


def bad_columns(folder):
    for split in ("train", "test"):
        datasets.Dataset.from_dict({"a": [1, 2]}).to_parquet(folder / f"{split}.parquet")
    return folder, "{'a': 'int64'}; it needs an Image column, and a ClassLabel column or an integer column `label`"


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


def bad_label(folder):
    parquet(folder, "train", labels=(0, 1, 2))
    return parquet(folder, "test"), "has the label 2, but 2 classes: number them"


BAD = [value for name, value in list(globals().items()) if name.startswith("bad_")]


@pytest.mark.parametrize("make", BAD)
def test_unusable_data_is_one_sentence(tmp_path, capsys, make):
    path, sentence = make(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        data.load_images(str(path))
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert sentence in error
    assert error.startswith("error: --dataset ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64"])
def test_labels_without_names_are_integers_of_any_kind(tmp_path, dtype):
    for split in ("train", "test"):
        parquet(tmp_path, split, names=None, labels=(0, 1, 1), dtype=dtype)
    train, _ = data.load_images(str(tmp_path))
    assert train.tensors[1].tolist() == [0, 1, 1]
    assert train.classes == ["0", "1"]
