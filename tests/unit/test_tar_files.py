"""Samples in tar files: any of them, in any order, whole, and never those of another file."""

import io
import json
import tarfile
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_accelerator
from PIL import Image
from tars import write_tar

from scripts.resnet50 import CenterCrop
from utils.data import tar_files
from utils.data.image_files import ImageFiles
from utils.data.images import load_splits
from utils.data.tar_files import TarFiles
from utils.items import UnreadableItem
from utils.loader import GlobalLoader


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def numbered(first, last):
    """Members of two kinds, of unequal sizes, and of which some are empty."""
    return [(f"{n:04}.{kind}", b"%d" % n * (n % 5)) for n in range(first, last) for kind in ("txt", "cls")]


def test_each_sample_is_read_from_files_of_unequal_length(tmp_path):
    parts = [(0, 3), (3, 3), (3, 4), (4, 90)]
    paths = [write_tar(tmp_path / f"{n}.tar", numbered(*part)) for n, part in enumerate(parts)]
    data = TarFiles(paths)
    assert len(data) == 90
    for index in (*range(90), 5, 0, 89):
        sample = data[index]
        content = b"%d" % index * (index % 5)
        where = next(path for path, (first, last) in zip(paths, parts, strict=True) if first <= index < last)
        assert sample == {"__url__": str(where), "__key__": f"{index:04}", "txt": content, "cls": content}
    assert [sample["__key__"] for sample in data] == [f"{n:04}" for n in range(90)]
    assert data[-1] == data[89]
    with pytest.raises(IndexError):
        data[90]
    assert TarFiles(paths, lambda sample: len(sample["txt"]), extensions=["txt"])[44] == 8
    assert [sorted(sample) for sample in TarFiles(paths[:1], extensions=["cls"])] == [["__key__", "__url__", "cls"]] * 3


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_one_key_are_one_sample_wherever_they_are(tmp_path, layout):
    deep = "/".join(["folder"] * 12)
    members = [("b/1.JPG", b"x"), ("a/1.jpg", b"y"), ("a/1.seg.png", b"z"), ("b/1.cls", b"7"), (f"{deep}/ö.jpg", b"o")]
    path = write_tar(tmp_path / "of.folders.tar", members, format=layout)
    with tarfile.open(path, "a", format=layout) as tar:  # folders and links are no samples
        tar.addfile(tarfile.TarInfo("a"), None)
        folder = tarfile.TarInfo("c")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("a/2.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "1.jpg"
        tar.addfile(link)
    found = [{name: part for name, part in sample.items() if name != "__url__"} for sample in TarFiles([path])]
    assert found == [
        {"__key__": "b/1", "jpg": b"x", "cls": b"7"},
        {"__key__": "a/1", "jpg": b"y", "seg.png": b"z"},
        {"__key__": f"{deep}/ö", "jpg": b"o"},
    ]


def test_tar_files_are_scanned_once_and_again_if_one_has_changed(tmp_path, capsys):
    paths = [write_tar(tmp_path / f"{n}.tar", numbered(9 * n, 9 * n + 9)) for n in range(3)]
    state = torch.get_rng_state()
    first = TarFiles(paths)
    assert torch.equal(torch.get_rng_state(), state)  # a run must not depend on what is in the cache
    assert "scanning 3 tar files beside" in capsys.readouterr().out
    assert TarFiles(paths).fingerprint == first.fingerprint
    assert "scanning" not in capsys.readouterr().out
    write_tar(paths[1], numbered(50, 53))
    changed = TarFiles(paths)
    assert [sample["__key__"] for sample in changed][9:12] == ["0050", "0051", "0052"]
    assert len(changed) == 21
    assert changed.fingerprint != first.fingerprint
    with pytest.raises(UnreadableItem, match=r"1\.tar: 0009: ValueError: the file has changed during the run"):
        first[9]
    paths[0].unlink()
    tar_files.open_unchanged.cache_clear()
    with pytest.raises(UnreadableItem, match=r"0\.tar: 0000: FileNotFoundError: No such file"):
        first[0]


@pytest.mark.parametrize("size", [0, 1536, 3000])  # members end at n * 1536
def test_a_file_that_is_cut_off_is_named(tmp_path, stops, size):
    path = write_tar(tmp_path / "cut.tar", [(f"{n}.txt", b"x" * 600) for n in range(5)])
    content = path.read_bytes()
    path.write_bytes(content[:size])
    said = stops(TarFiles, [path])
    assert "cut.tar is not a whole, uncompressed tar file" in said
    assert ("after" in said) == (size >= 512)
    assert len(said.splitlines()) == 1


def test_files_that_are_no_tar_files_are_named(tmp_path, stops):
    whole = write_tar(tmp_path / "whole.tar", numbered(1, 9)).read_bytes()
    for name, content in {
        "two.tar": whole + whole,
        "broken.tar": whole[:1024] + b"?" * 512 + whole[1536:],
        "text.tar": b"no tar file" * 200,
    }.items():
        (tmp_path / name).write_bytes(content)
        assert f"{name} is not a whole" in stops(TarFiles, [tmp_path / name])
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as tar:
        tar.add(tmp_path / "whole.tar")
    assert "packed.tar is not a whole, uncompressed" in stops(TarFiles, [tmp_path / "packed.tar"])
    twice = write_tar(tmp_path / "twice.tar", [*numbered(1, 9), ("0003.TXT", b"other")])
    assert "(two members are named 0003.txt, after 0008.cls)" in stops(TarFiles, [twice])
    with pytest.raises(FileNotFoundError, match=r"none\.tar"):
        TarFiles([tmp_path / "none.tar"])


def test_errors_of_decode_name_the_sample_and_others_keep_their_traceback(tmp_path):
    path = write_tar(tmp_path / "some.tar", numbered(0, 3))
    with pytest.raises(UnreadableItem, match=r"some\.tar: 0002: ValueError: invalid literal .* 'b?"):
        TarFiles([path], lambda sample: int(sample["txt"].decode() + "?"))[2]
    with pytest.raises(UnreadableItem, match=r"some\.tar: 0001: KeyError: 'jpg'"):
        TarFiles([path], lambda sample: sample["jpg"])[1]
    with pytest.raises(TypeError):
        TarFiles([path], lambda sample: sample["txt"] + 1)[1]


def png(colour) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (colour, colour, colour)).save(file, "PNG")
    return file.getvalue()


def image_folder(folder, label=lambda n: ("cls", b"%d" % (n % 3)), count=6):
    """A folder of webdataset's form: train-0.tar, train-1.tar, val-0.tar."""
    for name, first in (("train-000000", 0), ("train-000001", count), ("val-000000", 2 * count)):
        numbers = range(first, first + count)
        members = [pair for n in numbers for pair in ((f"{n}.png", png(n)), (f"{n}.{label(n)[0]}", label(n)[1]))]
        write_tar(folder / f"{name}.tar", members)
    return str(folder)


def center(split):
    return ImageFiles(split, CenterCrop(SimpleNamespace(eval_size=8, eval_resize=8)))


@pytest.mark.parametrize(
    "label", [lambda n: ("cls", b"%d\n" % (n % 3)), lambda n: ("json", json.dumps({"label": n % 3}).encode())]
)
def test_images_and_labels_are_a_split(tmp_path, label):
    dataset, cache = image_folder(tmp_path / "images", label), str(tmp_path / "cache")
    for _ in range(2):  # the second from the cache
        train, test = map(center, load_splits(dataset, cache_dir=cache))
        assert (len(train), len(test), train.classes) == (12, 6, ["0", "1", "2"])
        for data, first in ((train, 0), (test, 12)):
            for index in range(len(data)):
                pixels, number = data[index]
                assert (int(pixels[0, 0, 0]), number) == (first + index, (first + index) % 3)
    assert train.split.rows[3]["image"]["bytes"] == png(3)
    assert list(tmp_path.glob("cache/tar/*/labels.npy"))
    loader = GlobalLoader(train, 5, fake_accelerator(), seed=0, collate_fn=train.collate)
    assert loader.describe()["fingerprint"] == train.split.rows.fingerprint
    assert sorted(int(pixel) for batch in loader for pixel in batch.data[0][:, 0, 0, 0]) == list(range(12))


def test_a_name_in_the_list_of_classes_is_the_number_of_its_line(tmp_path, capsys, stops):
    folder = tmp_path / "images"
    for split in ("train", "test"):
        members = [("1.input.png", png(0)), ("1.cls", b"cat"), ("2.input.png", png(1)), ("2.cls", b"dog\n")]
        write_tar(folder / f"{split}.tar", members)
    (folder / "classes.txt").write_text("dog\n\nox\n cat \n")
    for rows in load_splits(str(folder)):
        assert rows.classes == ["dog", "ox", "cat"]
        assert rows.labels.tolist() == [2, 0]
        assert rows.rows[1]["image"]["bytes"] == png(1)
    assert "left out" not in capsys.readouterr().out
    (folder / "classes.txt").write_text("cat\ndog\n")  # the tar files have not changed
    assert load_splits(str(folder))[0].labels.tolist() == [0, 1]
    (folder / "classnames.txt").write_text("cat\ndog\n")
    assert "only one of them may be there" in stops(load_splits, str(folder))


def test_images_that_cannot_be_used_are_named(tmp_path, stops):
    """The other sentences are those of tests/programs/inputs.py."""

    folder = image_folder(tmp_path / "labels", lambda n: ("json", b'{"label": true}'))
    assert "0: ValueError: its label is True" in stops(load_splits, folder)
    dataset = image_folder(tmp_path / "names")
    for members, words in {
        (("1.txt", b""), ("1.cls", b"0")): r"1: ValueError: it has 0 images \(\): see --image_column",
        (("1.png", b"no image"), ("1.cls", b"0")): r"1\.png cannot be decoded",
    }.items():
        write_tar(tmp_path / "names" / "val-000000.tar", members)
        _, test = load_splits(dataset)
        with pytest.raises(UnreadableItem, match=rf"val-000000\.tar: {words}"):
            center(test)[0]
