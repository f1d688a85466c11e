import hashlib
import io
import itertools
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import MNIST
from PIL import Image

from utils import data

SUMS = {
    "train-00000-of-00001.parquet": "8bc30132d0b27305c1ecbc716f595401c13cc7b92fc1613c1fd0d29076ad8e43",
    "test-00000-of-00001.parquet": "41291c7c8ca471b4561a3d04a0d11253fd5e2370a5db61f8546347a04b154a7c",
}


@pytest.fixture(autouse=True)
def _own_cache(home, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def fake_accelerator(processes=1, rank=0):
    return SimpleNamespace(device=torch.device("cpu"), num_processes=processes, process_index=rank)


def numbered(count: int) -> data.Images:
    labels = torch.arange(count)
    return data.Images((labels % 256).to(torch.uint8).view(-1, 1, 1, 1), labels, ["one"])


def image_folder(root, size=(4, 4), color="L", splits=("train", "test"), suffix="png"):
    for split in splits:
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((*size[::-1], 3) if color == "RGB" else size[::-1], 100 * label + i, np.uint8)
                Image.fromarray(pixels, color).save(root / split / name / f"{i}.{suffix}")
    return root


@pytest.mark.parametrize("name", SUMS)
def test_bundled_mnist_is_unchanged(name):
    assert hashlib.sha256((MNIST / name).read_bytes()).hexdigest() == SUMS[name]


def test_bundled_mnist_has_the_known_counts_and_pixels():
    train, test = data.load_images(str(MNIST))
    assert train.images.shape == (60000, 1, 28, 28)
    assert test.images.shape == (10000, 1, 28, 28)
    assert train.images.dtype == torch.uint8
    # Class counts as published; mean and deviation as the script's constants.
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert train.images.double().mean() == pytest.approx(33.3184, abs=1e-4)
    assert train.images.double().std() == pytest.approx(78.5675, abs=1e-4)


def test_pgm_fast_path_equals_pil(small_mnist):
    split = datasets.load_dataset(str(small_mnist))["test"]
    contents = split.data.column("image").combine_chunks().field("bytes").to_pylist()
    fast = data.decode_pgm(contents)
    slow = data.decode_any(contents, [None] * len(contents), "x", 2)
    assert np.array_equal(fast, slow)
    assert data.decode_pgm([*contents[:3], contents[0][:-1]]) is None  # not all of one size: PIL decides


@pytest.mark.parametrize(("color", "channels"), [("L", 1), ("RGB", 3)])
def test_folder_of_images_by_class(tmp_path, color, channels):
    train, test = data.load_images(str(image_folder(tmp_path, (5, 4), color)), num_workers=2)
    assert train.images.shape == (6, channels, 4, 5)
    assert train.classes == ["cat", "dog"]
    for label, image in zip(test.labels, test.images, strict=True):
        assert image.flatten()[0] // 100 == label


def test_validation_counts_as_test(tmp_path):
    _, test = data.load_images(str(image_folder(tmp_path, splits=("train", "validation"))))
    assert len(test.labels) == 6


def bad_missing(folder):
    return folder / "nowhere", "neither a folder nor a Hub id"


def bad_hub_id(folder):
    return "no-such-owner/no-such-data", "cannot be loaded from the Hub"


def bad_empty(folder):
    return folder, "is damaged"


def bad_no_test(folder):
    return image_folder(folder, splits=("train",)), "needed are train and one of"


def bad_file(folder):
    image_folder(folder)
    (folder / "train" / "cat" / "1.png").write_bytes(b"not an image")
    return folder, "1.png cannot be decoded"


def bad_size(folder):
    image_folder(folder)
    Image.new("L", (9, 4)).save(folder / "train" / "dog" / "2.png")
    return folder, "2.png has 9x4 pixels and the first image 4x4"


def bad_columns(folder):
    for split in ("train", "test"):
        datasets.Dataset.from_dict({"a": [1, 2]}).to_parquet(folder / f"{split}.parquet")
    return folder, "needed are an image and a label column"


def bad_shapes(folder):
    image_folder(folder)
    for path in (folder / "test").rglob("*.png"):
        Image.new("L", (3, 3)).save(path)
    return folder, "test images of (1, 3, 3)"


@pytest.mark.parametrize(
    "make", [bad_missing, bad_hub_id, bad_empty, bad_no_test, bad_file, bad_size, bad_columns, bad_shapes]
)
def test_unusable_data_is_one_sentence(tmp_path, capsys, make):
    path, sentence = make(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        data.load_images(str(path))
    error = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert sentence in error
    assert error.startswith("error: --dataset ")
    assert len(error.splitlines()) == 1


def test_fingerprint_is_of_the_content():
    one, other = numbered(10), numbered(10)
    assert data.fingerprint(one) == data.fingerprint(other)
    other.images[3] += 1
    assert data.fingerprint(one) != data.fingerprint(other)
    assert data.fingerprint(one, other) != data.fingerprint(other, one)


@pytest.mark.parametrize("samples", [1, 7, 64, 65, 127, 1003])
@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1), (3, 5)])
def test_each_sample_once_and_equal_updates_on_any_topology(samples, processes, accumulation):
    def updates(processes, accumulation, epoch):
        """Sample indices of each update, from what all processes see, and how many batches each process gets."""
        by_rank = []
        for rank in range(processes):
            batches = data.GlobalBatches(
                numbered(samples), 60, fake_accelerator(processes, rank), seed=5, accumulation=accumulation
            )
            by_rank.append(list(batches.epoch(epoch)))
        counts = {len(batches) for batches in by_rank}
        assert len(counts) == 1  # one batch more on one rank is a hang at the end of the epoch
        assert counts.pop() == len(batches) * accumulation
        found = []
        for at in range(0, len(by_rank[0]), accumulation):
            pieces = [batch for batches in by_rank for batch in batches[at : at + accumulation]]
            indices = torch.cat([piece.indices for piece in pieces])
            assert all(piece.update_size == len(indices) for piece in pieces)
            assert max(map(len, (p.indices for p in pieces))) - min(map(len, (p.indices for p in pieces))) <= 1
            assert all(torch.equal(piece.labels, piece.indices) for piece in pieces)
            found.append(sorted(indices.tolist()))
        return found

    ours, plain = updates(processes, accumulation, epoch=2), updates(1, 1, epoch=2)
    assert ours == plain
    assert sorted(itertools.chain(*ours)) == list(range(samples))
    if samples > 60:
        assert ours != updates(processes, accumulation, epoch=3)


def test_any_update_is_found_without_the_ones_before():
    batches = data.GlobalBatches(numbered(1003), 60, fake_accelerator(), seed=1, accumulation=2)
    whole = [batch.indices.tolist() for batch in batches.epoch(4)]
    assert [batch.indices.tolist() for batch in batches.epoch(4, first_update=7)] == whole[14:]
    assert list(batches.epoch(4, first_update=len(batches))) == []


def test_order_is_shuffled_by_seed_and_epoch_and_kept_without_seed():
    orders = [
        data.GlobalBatches(numbered(100), 10, fake_accelerator(), seed=seed).order(epoch).tolist()
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(order != sorted(order) for order in orders)
    assert data.GlobalBatches(numbered(100), 10, fake_accelerator(), seed=None).order(3).tolist() == list(range(100))


def test_random_uniform_is_a_function_of_seed_step_and_sample_alone():
    indices = torch.randperm(60000)[:512]
    whole = data.random_uniform(3, 70, indices, (256,))
    parts = [data.random_uniform(3, 70, part, (256,)) for part in indices.tensor_split(7)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.shape == (512, 256)
    for other in (data.random_uniform(4, 70, indices, (256,)), data.random_uniform(3, 71, indices, (256,))):
        assert (whole == other).float().mean() < 0.001


def test_random_uniform_is_uniform_and_uncorrelated():
    numbers = torch.cat([data.random_uniform(0, step, torch.arange(1000), (8, 16)) for step in range(10)]).double()
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    flat = numbers.flatten(1)
    for one, other in ((flat[:, :-1], flat[:, 1:]), (flat[:-1], flat[1:]), (flat[:-1000], flat[1000:])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / one.numel() ** 0.5


def test_predict_reads_one_grey_image(tmp_path):
    Image.new("RGB", (50, 40), (255, 255, 255)).save(tmp_path / "white.png")
    assert data.load_grey_image(tmp_path / "white.png", 28).tolist() == torch.full((1, 1, 28, 28), 255).tolist()
    with pytest.raises(SystemExit):
        data.load_grey_image(tmp_path / "none.png", 28)


def test_images_of_any_format_decode_alike(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    contents = []
    for kind in ("PNG", "BMP", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        contents.append(buffer.getvalue())
    decoded = data.decode_any(contents, [None] * 3, "x", 0)
    assert (decoded == pixels).all()
