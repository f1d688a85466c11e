"""ResNet-50: N processes are one process with N accumulation steps, and the files are whole."""

import contextlib
import copy
import itertools
import math
import os
import pickle
import sys
from types import SimpleNamespace

import pytest
import run_many
import run_reader
import safetensors.torch
import torch
import torchvision
from conftest import ROOT
from PIL import Image
from plain_loop import assert_same_as_plain, batches_of
from run_reader import lines
from small_resnets import use_4_blocks
from torch import nn

from scripts import resnet50
from utils.accelerator import TrainingAccelerator
from utils.data.image_files import ImageFiles
from utils.data.images import load_splits
from utils.pretrained import load_pretrained

RECIPE = ["--mixup", 0.2, "--cutmix", 1, "--trivial_augment", "--erase", 0.2, "--flip", 0.5]
RECIPE += ["--label_smoothing", 0.1, "--ema_decay", 0.9]
CENTER = resnet50.CenterCrop(SimpleNamespace(eval_size=32, eval_resize=32))


@pytest.fixture
def run_4_blocks(tiny_mnist, tmp_path, monkeypatch, home):
    """`main` in this process, with 4 blocks and images of 16 pixels; returns its exit code."""
    use_4_blocks(monkeypatch.setattr)

    def run(folder, *flags):
        words = ["--dataset", tiny_mnist, "--image_size", 16, "--batch_size", 16]
        words += ["--log_every", 1, "--output_dir", tmp_path / folder, *flags]
        return run_many.run("resnet50", words)

    return run


@pytest.mark.slow
def test_two_processes_are_one_with_two_accumulation_steps(runs, tiny_mnist):
    """Losses, weights, running statistics, moving average, tests with a metric of the library evaluate."""
    flags = ["resnet50", "--float64", "--dataset", tiny_mnist, "--batch_size", 16, "--max_steps", 4, "--log_every", 1]
    flags += [*RECIPE, "--metrics", ROOT / "examples" / "f1_macro"]
    one = runs("small", *flags, "--gradient_accumulation_steps", 2)
    two = runs("small", *flags, on=("cpu_ddp",))
    assert two.differs_from(one) <= 1e-8
    assert [line["split"] for line in lines(two.folder)] == ["train"] * 3 + ["test", "train", "test"]
    assert run_reader.summary(two.folder)["test_samples"] == 23
    assert lines(two.folder, "test")[-1]["f1_macro"] > 0


def test_images_are_normalized_as_for_torchvisions_weights():
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    weights = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms()
    normalized = torchvision.transforms.functional.normalize(images / 255, weights.mean, weights.std)
    for given in (images, images.float()):
        before = given.clone()
        torch.testing.assert_close(resnet50.normalize(given), normalized, rtol=1e-5, atol=1e-5)
        assert torch.equal(given, before)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
def test_mixing_does_not_depend_on_how_the_batch_is_cut(mixup, cutmix):
    pixels = torch.randint(256, (8, 3, 20, 20), dtype=torch.uint8)
    kinds, fractions = set(), set()
    for step in range(8):
        whole, partners, kept = resnet50.mix(pixels, mixup, cutmix, 3, step)
        assert partners.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
        for start in (0, 4):
            part, _, same = resnet50.mix(pixels[start : start + 4], mixup, cutmix, 3, step)
            assert torch.equal(part, whole[start : start + 4])
            assert same == kept
        kinds.add(whole.dtype)
        fractions |= {kept, resnet50.mix(pixels, mixup, cutmix, 4, step)[2]}
        if whole.dtype == torch.uint8:  # CutMix: the fraction is that of the pixels
            own = (whole == pixels).all(1).double().mean()
            assert float(own) == pytest.approx(kept, abs=0.01)
        else:
            expected = kept * pixels.float() + (1 - kept) * pixels[partners].float()
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-3)
    assert len(kinds) == 1 + bool(mixup and cutmix)
    assert len(fractions) > 12  # of 2 seeds x 8 steps; CutMix rounds them to pixels


def test_learning_rate():
    factor = [resnet50.lr_factor(step, "cosine", 10, 100, 110) for step in range(110)]
    assert factor[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert factor[10] == 1.0
    assert factor[60] == pytest.approx(0.5)
    assert factor[109] == pytest.approx(0.5 + 0.5 * math.cos(math.pi * 0.99))
    epochs = (0, 29, 30, 59, 60, 89)
    stairs = [resnet50.lr_factor(epoch * 7, "step", 0, 7, 90 * 7) for epoch in epochs]
    assert stairs == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["resnet50.py", *map(str, flags)])
    return resnet50.parse_args()


def test_presets_equal_torchvisions_and_flags_count_beside_them(monkeypatch):
    v1, v2 = (vars(parse(monkeypatch, "--preset", name)) for name in ("v1", "v2"))
    assert [each["lr"] * each["batch_size"] / 256 for each in (v1, v2)] == [0.1, 0.5]
    of_v1 = {"num_epochs": 90, "weight_decay": 1e-4, "schedule": "step", "nesterov": False, "zero_init": False}
    of_v2 = {"batch_size": 1024, "num_epochs": 600, "mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1}
    of_v2 |= {"image_size": 176, "eval_size": 224, "eval_resize": 232}
    assert (v1 | of_v1, v2 | of_v2) == (v1, v2)
    changed = parse(monkeypatch, "--preset", "v2", "--lr", 0.3, "--no-trivial_augment")
    assert (changed.lr, changed.trivial_augment) == (0.3, False)


def test_pretrained_weights_run_no_code(tmp_path, monkeypatch):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    file = tmp_path / "w.pth"
    torch.save({"fc.weight": Trap()}, file)

    def fetch(url, map_location, weights_only, check_hash):
        assert check_hash
        return torch.load(file, map_location, weights_only=weights_only)

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    for source in (str(file), "https://example.org/w.pth"):
        with pytest.raises(pickle.UnpicklingError):
            load_pretrained(nn.Linear(1, 1), source)
        assert not (tmp_path / "trapped").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "trapped").exists()  # the trap works


def test_pretrained_weights_are_found_in_files_as_people_have_them(tmp_path):
    source = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    weights = source.state_dict()
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("1.")}
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()}
    files = [(prefixed, True), ({"state_dict": prefixed}, True), ({"state_dict": weights, "epoch": 3}, True)]
    files += [({"model": weights, "optimizer": {"state": {}}}, True), (weights, True), ({"model": body}, False)]
    files += [(body | {"1.weight": torch.zeros(7, 3), "1.bias": torch.zeros(7)}, False)]  # a head of other classes
    for number, (content, has_head) in enumerate(files):
        model, file = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), str(tmp_path / f"{number}.pth")
        head = {name: tensor.clone() for name, tensor in model[1].state_dict().items()}
        torch.save(content, file)
        if content is weights:
            file = str(tmp_path / "w.safetensors")
            safetensors.torch.save_file(content, file)
        load_pretrained(model, file, head="1")
        assert torch.equal(model[0].weight, source[0].weight)
        expected = source[1].state_dict() if has_head else head
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model[1].state_dict().items())
        with contextlib.nullcontext() if has_head else pytest.raises(RuntimeError, match=r"1\.weight"):
            load_pretrained(model, file)
    torch.save(weights | {"0.weight": torch.zeros(9, 2)}, tmp_path / "body.pth")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        load_pretrained(model, str(tmp_path / "body.pth"), head="1")


def test_model_and_moving_average_are_tested_in_the_precision_of_the_run(run_4_blocks, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    make_model, seen = resnet50.make_model, set()

    def make_watched_model(*args):
        model = make_model(*args)

        def watch(layer, _, output):
            seen.add((id(layer), layer.training, output.dtype))

        model.fc.register_forward_hook(watch)  # the copy that the average is keeps the hook
        return model

    monkeypatch.setattr(resnet50, "make_model", make_watched_model)
    # At 16 pixels a convolution of stride 2 gets one pixel: PyTorch 2.15 then leaves parts of its
    # weight gradient uninitialised, in bf16 on a CPU.
    flags = ["--max_steps", 1, "--ema_decay", 0.9, "--image_size", 32]
    assert run_4_blocks("run", *flags) is None
    assert {dtype for _, _, dtype in seen} == {torch.bfloat16}
    assert sorted(training for _, training, _ in seen) == [False, False, True]


@pytest.mark.slow
def test_it_is_the_plain_loop(run_4_blocks, tiny_mnist, tmp_path, monkeypatch, float64):
    """Weights, learning rates, moving average and tests, with values that are no defaults."""
    made = []
    make_model = resnet50.make_model

    def keep(*args):
        made.append(make_model(*args))
        made.append(copy.deepcopy(made[0]))
        return made[0]

    monkeypatch.setattr(resnet50, "make_model", keep)
    # 3 steps are an epoch; the learning rate rises in the first 4. Whole images, as they are.
    flags = ["--seed", 3, "--lr", 0.4, "--weight_decay", 0.02, "--norm_weight_decay", 0.05]
    flags += ["--ema_decay", 0.6, "--ema_every", 2, "--warmup_epochs", 1.34, "--max_steps", 6, "--min_crop", 1]
    flags += ["--mixup", 0.2, "--cutmix", 0.9, "--label_smoothing", 0.15, "--schedule", "step"]
    assert run_4_blocks("run", *flags, "--image_size", 32, "--no-zero_init") is None

    _, model = made
    torch.manual_seed(3)
    fresh = torchvision.models.resnet50(num_classes=10)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    splits = [ImageFiles(split, CENTER) for split in load_splits(str(tiny_mnist))]
    train_data, test_data = [split.collate([split[i] for i in range(len(split))]) for split in splits]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.05}]
    optimizer = torch.optim.SGD(groups, 0.4 * 16 / 256, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: resnet50.lr_factor(step, "step", 1.34 * 3, 3, 6)
    )
    average = {}

    def losses():
        whole = (rows for _, rows in batches_of(50, 16, seed=3, epochs=2) if len(rows) == 16)
        for step, rows in enumerate(itertools.islice(whole, 6)):
            labels = train_data[1][rows]
            mixed, partners, kept = resnet50.mix(train_data[0][rows], 0.2, 0.9, 3, step)
            smooth = [nn.functional.one_hot(each, 10) * 0.85 + 0.015 for each in (labels, labels[partners])]
            logits = model.train()(resnet50.normalize(mixed))
            yield nn.functional.cross_entropy(logits, kept * smooth[0] + (1 - kept) * smooth[1])
            if step % 2:  # in the warm-up it is a copy of the model
                kept = 0.6 if step == 5 else 0.0
                for name, tensor in model.state_dict().items():
                    average[name] = kept * average.get(name, 0.0) + (1 - kept) * tensor

    run = tmp_path / "run"
    assert_same_as_plain(run, model, losses(), optimizer, schedule, rtol=1e-7, atol=1e-10)
    tested = lines(run, "test")[-1]
    for prefix, name in (("", "model"), ("ema_", "model_ema")):
        saved = run_reader.weights(run, name)
        model.load_state_dict(saved)
        if prefix:
            for name in dict(model.named_parameters()):
                torch.testing.assert_close(saved[name], average[name], rtol=1e-7, atol=1e-10)
        with torch.no_grad():
            logits = model.eval()(resnet50.normalize(test_data[0]))
        losses_of_test = nn.functional.cross_entropy(logits, test_data[1])
        assert tested[f"{prefix}loss"] == pytest.approx(losses_of_test.item(), rel=1e-7)
        best = logits.argsort(1, descending=True)
        for name, count in (("accuracy", 1), ("top5_accuracy", 5)):
            hits = (best[:, :count] == test_data[1][:, None]).any(1).double().mean()
            assert tested[prefix + name] == pytest.approx(hits.item())


def test_each_flag_of_the_augmentation_reaches_its_place(run_4_blocks, monkeypatch):
    started = []
    monkeypatch.setattr(resnet50.Run, "start", lambda run, *loaders, **options: started.append(loaders) or sys.exit())
    flags = ["--image_size", 20, "--eval_size", 24, "--eval_resize", 28, "--min_crop", 0.3]
    run_4_blocks("run", *flags, "--flip", 0.25, "--trivial_augment", "--erase", 0.125)
    ((train_loader, test_loader, _),) = started
    augment = train_loader.dataset.transform
    flip, trivial_augment, erase = augment.others.transforms
    assert (flip.p, type(trivial_augment).__name__, erase.p) == (0.25, "TrivialAugmentWide", 0.125)
    assert augment(Image.new("RGB", (40, 30))).shape == (3, 20, 20)
    center = test_loader.dataset.transform
    assert center(Image.new("RGB", (56, 28), "white")).shape == (3, 24, 24)
    assert test_loader.dataset.deterministic


def test_residual_blocks_start_as_the_identity_if_asked_to():
    accelerator = TrainingAccelerator(cpu=True)
    for zero_init in (True, False):
        args = SimpleNamespace(zero_init=zero_init, pretrained=None, bn="local")
        model = resnet50.make_model(args, 10, accelerator)
        weights = [layer[number].bn3.weight for layer in (model.layer1, model.layer4) for number in (0, 1)]
        found = [bool((weight == 0).all()) for weight in weights]
        assert found == [False, zero_init, False, zero_init]
