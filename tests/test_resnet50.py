"""ResNet-50: the model is torchvision's, and N processes are one process with N accumulation steps."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import several
import torch
import torchvision
from conftest import MNIST, ROOT
from PIL import Image
from torch import nn

from scripts import resnet50
from utils.batch_norm import weigh_batch_norms
from utils.checkpoint import read_checkpoint

# Runs as several.py has them, but in float64, so that "equal" is told from "close", and with a quarter of the blocks.
IN_FLOAT64 = """
import sys
sys.path.insert(0, {tests!r})
import several
import test_resnet50
test_resnet50.use_float64(setattr)
several.main()
"""
RECIPE = ["--mixup", 0.2, "--cutmix", 1, "--trivial_augment", "--erase", 0.2, "--flip", 0.5, "--label_smoothing", 0.1]
RECIPE += ["--ema_decay", 0.9, "--repeats", 2]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny_mnist(small_mnist, tmp_path_factory):
    """50 training and 23 test images."""
    import datasets

    folder = tmp_path_factory.mktemp("tiny_mnist")
    for split, rows in (("train", 50), ("test", 23)):
        files = str(small_mnist / f"{split}-00000-of-00001.parquet")
        data = datasets.Dataset.from_parquet(files, cache_dir=str(folder / "cache"))
        data.select(range(rows)).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder / "data"


def use_float64(setattr):
    init = torchvision.models.ResNet.__init__
    setattr(
        torchvision.models.ResNet,
        "__init__",
        lambda self, block, _, *more, **kw: init(self, block, [1] * 4, *more, **kw),
    )
    setattr(resnet50, "TEST_BATCH_SIZE", 64)
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def in_float64(monkeypatch):
    use_float64(monkeypatch.setattr)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_two_processes_are_one_with_two_accumulation_steps_and_resume_bitwise(launcher, tiny_mnist, in_float64):
    """Losses, weights, running statistics and the moving average; then a resume after update 2 of 4."""
    (launcher.folder / "in_float64.py").write_text(IN_FLOAT64.format(tests=str(ROOT / "tests")))
    flags = ["--dataset", tiny_mnist, "--batch_size", 16, "--max_steps", 4, "--log_every", 1, "--checkpoint_every", 2]
    flags += RECIPE
    one, two, resumed = (launcher.folder / name for name in ("one", "two", "resumed"))
    again = ["--back_to", two, 2, resumed, *flags, "--resume", "--output_dir", resumed]
    words = several.words("resnet50", [*flags, "--output_dir", two], again)
    launcher("cpu_ddp", *words, script=launcher.folder / "in_float64", timeout=300)
    assert several.run("resnet50", [*flags, "--gradient_accumulation_steps", 2, "--output_dir", one]) is None
    assert [line["split"] for line in lines(two)] == ["train"] * 3 + ["test", "train", "test"]
    for a, b in zip(lines(one), lines(two), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"split", "images_per_s", "data_wait_pct"}:
            assert b[name] == pytest.approx(a[name], rel=1e-9)
    states = [read_checkpoint(folder / "checkpoints" / "step_00000004")[1] for folder in (one, two)]
    compared = 0
    for file in ("model.safetensors", "ema.safetensors"):
        for name, tensor in states[0][file].items():
            if "num_batches_tracked" not in name:  # two of them in an update, or one
                torch.testing.assert_close(states[1][file][name], tensor, rtol=1e-6, atol=1e-8)
                compared += name.endswith("running_var")
    assert compared == 2 * 17
    summary = json.loads((two / "summary.json").read_text())
    assert summary["test_samples"] == 23
    assert sum(map(sum, summary["test_confusion"])) == 23
    assert {"confusion.png", "worst_predictions.png", "curves.png"} <= {path.name for path in two.iterdir()}

    for name in ("model.safetensors", "model_ema.safetensors"):  # what a stranger does with them
        bare = torchvision.models.resnet50(num_classes=10)
        bare.load_state_dict(safetensors.torch.load_file(two / name), strict=True)

    (_, launch) = json.loads((resumed / "run.json").read_text())["launches"]
    assert (launch["num_processes"], launch["from_step"]) == (2, 2)
    for name in ("model.safetensors", "model_ema.safetensors"):
        assert (resumed / name).read_bytes() == (two / name).read_bytes()


def test_the_model_is_that_of_torchvision():
    reference, ours = torchvision.models.resnet50(), resnet50.ResNet50(1000)
    assert sum(weight.numel() for weight in ours.parameters()) == 25_557_032
    ours.load_state_dict(reference.state_dict(), strict=True)
    assert ours.state_dict().keys() == reference.state_dict().keys()
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    normalized = torchvision.transforms.functional.normalize(images / 255, weights.mean, weights.std)
    reference.eval()
    ours.eval()
    with torch.no_grad():
        logits = reference(normalized)
        torch.testing.assert_close(ours(images), logits, rtol=1e-4, atol=1e-4)
        labels = logits.argsort(1, descending=True)[:, 3]
        losses, predicted, likelier = ours(images, labels)
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    assert predicted.tolist() == logits.argmax(1).tolist()
    assert likelier.tolist() == [3, 3]


def test_mixed_labels_and_smoothing():
    """A loss with a share of two labels is that of the mixed one-hot labels; no smoothing in the test."""
    model = resnet50.ResNet50(5, label_smoothing=0.1)
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 2])
    losses, _, _ = model(images, labels, partners, 0.3)
    with torch.no_grad():
        logits = model(images)  # in training mode: the statistics of the batch, and so the same
    mixed = 0.3 * nn.functional.one_hot(labels, 5) + 0.7 * nn.functional.one_hot(partners, 5)
    expected = nn.functional.cross_entropy(logits, 0.9 * mixed + 0.1 / 5, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    model.eval()
    losses, _, _ = model(images, labels)
    torch.testing.assert_close(losses, nn.functional.cross_entropy(model(images), labels, reduction="none"))


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_all_micro_batches_count_alike_in_the_running_statistics(accumulation):
    norm = nn.BatchNorm2d(3).double()
    expected = torch.zeros(3, dtype=torch.float64)
    for _ in range(3):
        pieces = torch.randn(accumulation, 4, 3, 2, 2, dtype=torch.float64)
        for micro_step, piece in enumerate(pieces):
            weigh_batch_norms(norm, micro_step, accumulation)
            norm(piece)
        expected = 0.9 * expected + 0.1 * pieces.mean((0, 1, 3, 4))
        torch.testing.assert_close(norm.running_mean, expected, rtol=1e-12, atol=1e-14)


def test_learning_rate():
    factor = [resnet50.lr_factor(step, "cosine", 10, 100, 110) for step in range(110)]
    assert factor[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factor[10] == 1.0
    assert factor[60] == pytest.approx(0.5)
    assert factor[109] == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 0.99))
    stairs = [resnet50.lr_factor(epoch * 7, "step", 0, 7, 90 * 7) for epoch in (0, 29, 30, 59, 60, 89)]
    assert stairs == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["resnet50.py", *map(str, flags)])
    return resnet50.parse_args()


def test_presets_are_those_of_torchvision_and_flags_count_beside_them(monkeypatch):
    v1 = run(monkeypatch, "--preset", "v1")
    assert (v1.lr * v1.batch_size / 256, v1.num_epochs, v1.weight_decay, v1.schedule) == (0.1, 90, 1e-4, "step")
    v2 = run(monkeypatch, "--preset", "v2", "--lr", 0.3, "--no-trivial_augment")
    assert (v2.batch_size, v2.num_epochs, v2.image_size, v2.eval_size, v2.eval_resize) == (1024, 600, 176, 224, 232)
    assert (v2.mixup, v2.cutmix, v2.label_smoothing, v2.repeats) == (0.2, 1.0, 0.1, 4)
    assert (v2.lr, v2.trivial_augment) == (0.3, False)
    assert resnet50.PRESETS["v2"]["lr"] * 1024 / 256 == 0.5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--batch_size", 1], "makes micro-batches of 1: BatchNorm needs 2 images or more"),
        (["--batch_size", 6, "--gradient_accumulation_steps", 2, "--mixup", 0.2], "cutmix an even number"),
        (["--batch_size", 8, "--repeats", 3], "--repeats 3 must divide the batch"),
        (["--bn", "sync"], "--bn sync is made for GPUs alone"),
        (["--batch_size", 64], "--batch_size 64 is more than the 50 training images"),
        (["--pretrained", "none.safetensors", "--batch_size", 4], "--pretrained none.safetensors cannot be read"),
        (["--preset", "v3"], "argument --preset: invalid choice: 'v3'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, tiny_mnist, flags, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["resnet50.py", "--dataset", str(tiny_mnist), *map(str, flags)])
    with pytest.raises(SystemExit) as stopped:
        resnet50.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert sentence in error


def test_pretrained_weights_but_not_the_last_layer(tmp_path):
    from utils.checkpoint import load_pretrained

    source, model = torchvision.models.resnet50(num_classes=7), resnet50.ResNet50(3)
    for file, save in (("w.pth", torch.save), ("w.safetensors", safetensors.torch.save_file)):
        save(source.state_dict(), tmp_path / file)
        before = model.fc.weight.clone()
        load_pretrained(model, str(tmp_path / file), head="fc")
        assert torch.equal(model.layer3[2].conv2.weight, source.layer3[2].conv2.weight)
        assert torch.equal(model.fc.weight, before)
    model = resnet50.ResNet50(7)
    load_pretrained(model, str(tmp_path / "w.pth"), head="fc")
    assert torch.equal(model.fc.weight, source.fc.weight)
    with pytest.raises(SystemExit):
        load_pretrained(nn.Sequential(), str(tmp_path / "w.pth"), head="fc")


@pytest.mark.slow
def test_a_broken_file_on_one_process_is_named_and_ends_both(launcher):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = launcher.folder / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(8):
                Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    bad = launcher.folder / "data" / "train" / "dog" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:600])
    flags = ["--dataset", "data", "--batch_size", 8, "--max_steps", 2, "--output_dir"]
    done = launcher("cpu_ddp", *flags, "stopped", script="resnet50", check=False)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "dog/3.jpg" in errors[0]
    done = launcher("cpu_ddp", *flags, "through", "--skip_bad_images", script="resnet50")
    assert done.stdout.count("left out: ") == 1
    data = json.loads((launcher.folder / "through" / "run.json").read_text())["data"]
    assert (data["train"], data["bad_images"]) == (15, 1)


@pytest.mark.slow
def test_the_default_run_reads_digits(launcher):
    """A shorter one: 50 updates, and 500 of the test images."""
    data = launcher.folder / "data"
    data.mkdir()
    train, test = (f"{split}-00000-of-00001.parquet" for split in ("train", "test"))
    (data / train).symlink_to(MNIST / train)
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(MNIST / test).slice(0, 500), data / test)
    flags = ["--dataset", data, "--max_steps", 50, "--output_dir", "run"]
    done = launcher("cpu", *flags, script="resnet50", timeout=600)
    assert "leaked" not in done.stderr  # triton's word for what it finds frozen at the end
    run = launcher.folder / "run"
    losses = [line["loss"] for line in lines(run) if line["split"] == "train"]
    assert losses[-1] < 0.5 * losses[0]
    assert json.loads((run / "summary.json").read_text())["test_accuracy"] >= 0.6


def test_the_script_is_short_enough_to_read():
    assert len((ROOT / "scripts" / "resnet50.py").read_text().splitlines()) < 300


def test_synthetic_images_of_1000_classes():
    from utils.data import GlobalSampler
    from utils.images import SyntheticLoader

    one = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0)
    loader = SyntheticLoader(2000, 16, one)
    batch = next(loader.load(GlobalSampler(loader.labels, 8, one, seed=0).pieces()))
    assert batch.images.shape == (8, 3, 16, 16)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert len(loader.classes) == 1000
