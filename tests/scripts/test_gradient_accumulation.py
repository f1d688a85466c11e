"""k micro-batches on P processes give the gradient of the mean over the whole batch."""

import json
import math
from types import SimpleNamespace

import pytest
import run_many
import safetensors.torch
import torch
from accelerate import Accelerator

from scripts import gradient_accumulation
from scripts.gradient_accumulation import (
    CellNet,
    choose_accumulation,
    count_ink_cells,
    gradient_difference,
    losses_and_predictions,
    samples_of_step,
)
from utils.datasets.images_in_memory import LabelledImages, load_images
from utils.loader import GlobalLoader
from utils.sampler import GlobalSampler

# 1003 images in batches of 250: the last step has 3 images for 10 micro-batches. Three of the
# five steps have a gradient that is clipped.
FLAGS = ["--batch_size", 250, "--num_epochs", 1, "--log_every", 1, "--dtype", "float64"]
FLAGS += ["--variable_length", "--max_grad_norm", 0.2]
FLOAT32 = ["--batch_size", 80, "--num_epochs", 1, "--compare"]


def read(folder, split):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def train(home, tmp_path):
    """Runs the script's main in this process; returns its folder."""

    def train(name, *flags):
        words = ["--output_dir", tmp_path / name, *flags]
        assert run_many.run("gradient_accumulation", words) is None
        return tmp_path / name

    return train


@pytest.fixture(scope="module")
def two_processes(shared_launcher, small_mnist):
    """What two processes print, and the folder with their runs: auto, float32 and resumable."""
    data = ["--dataset", small_mnist]
    auto = ["--micro_batch_size", "auto", "--cpu_memory_gib", 0.008, "--compare"]
    checkpoints = ["--checkpoint_every", 2, "--keep_checkpoints", 0]
    words = run_many.words(
        "gradient_accumulation",
        [*data, *FLAGS, *auto, "--output_dir", "auto"],
        [*data, *FLOAT32, "--gradient_accumulation_steps", 4, "--output_dir", "float32"],
        [*[*data, *FLAGS, *checkpoints], *["--gradient_accumulation_steps", 5, "--output_dir", "resumable"]],
    )
    return shared_launcher("cpu_ddp", *words, script=run_many.FILE).stdout, shared_launcher.folder


def assert_same_trace(folder, other):
    for line, expected in zip(read(folder, "train"), read(other, "train"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert [line[key] for key in ("step", "accuracy", "lr")] == [
            expected[key] for key in ("step", "accuracy", "lr")
        ]
    assert summary(folder)["test_loss"] == pytest.approx(summary(other)["test_loss"], rel=1e-12)


@pytest.mark.slow
def test_steps_equal_those_of_the_whole_batch_whatever_auto_chooses(two_processes, train, small_mnist):
    printed, runs = two_processes
    folder = runs / "auto"
    # 125 images a process, halved: 63, 32. The first number of steps from 4 on to divide 125: 5.
    assert "micro-batch   25 per process (32 would fit), 5 in a step" in printed
    (launch,) = json.loads((folder / "run.json").read_text())["launches"]
    assert launch["gradient_accumulation_steps"] == 5

    compared = read(folder, "compare")
    differences = [line["gradient_difference"] for line in compared]
    assert [line["step"] for line in compared] == [1, 2, 3, 4, 5]
    assert max(differences) <= 1e-12
    totals = summary(folder)
    assert totals["largest_gradient_difference"] == max(differences)
    assert (totals["steps"], totals["micro_batches"]) == (5, 25)
    assert (totals["gradient_all_reduces"], totals["scalar_all_reduces"]) == (5, 5)

    # The schedule counts steps: 5 of them go through the whole curve.
    optimizer = torch.optim.SGD([torch.zeros(1)], 2e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 5, cycle_momentum=False)
    expected = []
    for _ in range(5):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    used = [line["lr"] for line in read(folder, "train")]
    assert used == pytest.approx(expected, rel=1e-12)

    whole = train("whole", "--dataset", small_mnist, *FLAGS)
    assert_same_trace(folder, whole)
    assert summary(whole)["gradient_all_reduces"] == 0


@pytest.mark.parametrize("max_grad_norm", [0, 0.05])
def test_it_is_the_plain_loop(train, small_mnist, max_grad_norm):
    """Weights, learning rates and test of a PyTorch loop on whole batches; BatchNorm is tested
    with its running statistics."""
    flags = ["--dataset", small_mnist, "--batch_size", 250, "--max_steps", 3, "--log_every", 1]
    flags += ["--dtype", "float64", "--norm", "batch", "--seed", 4, "--weight_decay", 0.5]
    folder = train("run", *flags, "--max_grad_norm", max_grad_norm)
    data, test = load_images(str(small_mnist))
    torch.manual_seed(4)
    model = CellNet(1, 10, "batch").double()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 3, cycle_momentum=False)
    order, _ = GlobalSampler(len(data), 250, seed=4).items(0)
    rates, norms = [], []
    for rows in order.split(250)[:3]:
        losses, _ = losses_and_predictions(model, data.images[rows], data.labels[rows])
        losses.mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert min(norms) > 0.05  # all of them are clipped
    assert [line["lr"] for line in read(folder, "train")] == rates
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-9)
    model.eval()
    with torch.no_grad():
        losses, predicted = losses_and_predictions(model, test.images, test.labels)
    (tested,) = read(folder, "test")
    assert tested["loss"] == pytest.approx(losses.mean().item(), rel=1e-9)
    assert tested["accuracy"] == pytest.approx((predicted == test.labels).double().mean().item())


@pytest.mark.parametrize("flags", ["--micro_batch_size 8 --gradient_accumulation_steps 2", "--micro_batch_size none"])
def test_a_wrong_micro_batch_is_refused_in_one_sentence(flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gradient_accumulation.py", *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        gradient_accumulation.parse_args()
    assert stopped.value.code == 2
    assert "--micro_batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "steps"), [(128, 32, 4), (125, 32, 5), (7, 2, 7), (8, 9, 1)]
)
def test_micro_batches_are_of_one_size_and_no_larger_than_asked(batch_size, micro_batch_size, steps):
    args = SimpleNamespace(batch_size=batch_size, micro_batch_size=micro_batch_size)
    assert choose_accumulation(args, None, None, Accelerator(cpu=True)) == steps


@pytest.mark.parametrize("variable_length", [False, True])
def test_the_difference_sees_a_mean_of_means(variable_length):
    """A weighted mean agrees with the whole batch to rounding; a mean of means does not."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (10, 1, 28, 28), dtype=torch.uint8)
    images[:, :, :, 14:] = 0
    images[6:, :, 10:] = 0  # fewer cells with ink
    labels = torch.arange(10)
    weights = torch.ones(10)
    if variable_length:
        weights = count_ink_cells([images, labels])
    model = CellNet(1, 10, variable_length=variable_length).double()

    def run_micro_batches():
        model.zero_grad()
        for rows in torch.arange(10).split(4):  # the last one is smaller
            losses, _ = losses_and_predictions(model, images[rows], labels[rows])
            yield losses * weights[rows], weights[rows].sum()

    def difference(factor=1.0):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        return gradient_difference(model, norm * factor, images, labels, math.inf)

    sum(losses.sum() / weights.sum() for losses, _ in run_micro_batches()).backward()
    assert difference() < 1e-14
    assert difference(1.01) == pytest.approx(0.01)
    sum(losses.sum() / weight / 3 for losses, weight in run_micro_batches()).backward()
    assert difference() > 1e-2


def test_the_samples_of_a_step_are_those_of_its_micro_batches():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)
    data = LabelledImages(images, torch.arange(10), [str(digit) for digit in range(10)])
    loader = GlobalLoader(data, 4, Accelerator(cpu=True), seed=0, accumulation=2)
    for epoch in (0, 1):
        batches = list(loader.epoch(epoch))
        for step in range(3):
            images, labels = samples_of_step(loader, epoch, 3 * epoch + step)
            expected = torch.cat([batch.indices for batch in batches[2 * step : 2 * step + 2]])
            assert labels.tolist() == expected.tolist() == images.flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_float32_is_within_rounding(two_processes, train, small_mnist, processes):
    folder = two_processes[1] / "float32"
    if processes == 1:
        folder = train("run", "--dataset", small_mnist, *FLOAT32, "--gradient_accumulation_steps", 8)
    differences = [line["gradient_difference"] for line in read(folder, "compare")]
    assert len(differences) == 13
    assert max(differences) <= 1e-6


@pytest.mark.slow
def test_batch_norm_breaks_the_equality_and_layer_norm_keeps_it(train, small_mnist):
    flags = ["--dataset", small_mnist, *FLAGS, "--max_steps", 2, "--compare"]
    flags += ["--gradient_accumulation_steps", 5]
    batch, layer = (summary(train(norm, *flags, "--norm", norm)) for norm in ("batch", "layer"))
    assert batch["largest_gradient_difference"] > 1e-2
    assert layer["largest_gradient_difference"] <= 1e-12


@pytest.mark.slow
def test_peak_memory_falls(launcher):
    """In this order: memory that the first run leaves would make the peak of the second smaller."""
    flags = ["--batch_size", 8192, "--max_steps", 2, "--log_every", 1]
    runs = [[*flags, "--gradient_accumulation_steps", steps, "--output_dir", f"k{steps}"] for steps in (8, 1)]
    launcher("cpu", *run_many.words("gradient_accumulation", *runs), script=run_many.FILE)
    k1, k8 = (summary(launcher.folder / name)["above_start_gib"] for name in ("k1", "k8"))
    print(f"{k1} GiB whole, {k8} GiB in 8 micro-batches")
    assert k8 < 0.5 * k1


@pytest.mark.slow
def test_resume_goes_on_with_other_accumulation_and_processes(two_processes, train, small_mnist, tmp_path):
    folder = two_processes[1] / "resumable"
    resumed = run_many.back_to(folder, 2, tmp_path / "resumed")
    train("resumed", "--dataset", small_mnist, *FLAGS, "--resume", "--micro_batch_size", 50)
    assert summary(resumed)["steps"] == 3
    assert_same_trace(resumed, folder)
