"""k micro-batches on P processes give the gradient of the mean over the whole batch."""

import itertools
import math

import count_all_reduces
import pytest
import run_many
import run_reader
import torch
from plain_loop import assert_same_as_plain, batches_of
from run_reader import lines, summary
from same_numbers import largest_difference

from scripts.gradient_accumulation import CellNet, ink_cells, losses_and_predictions
from utils.data.images import load_images
from utils.sampler import GlobalSampler

# 1003 images in batches of 250: the last step has 3 images for 10 micro-batches. Three of the
# five steps have a gradient that is clipped.
FLAGS = ["--batch_size", 250, "--num_epochs", 1, "--log_every", 1, "--float64"]
FLAGS += ["--variable_length", "--max_grad_norm", 0.2]


@pytest.fixture
def train(home, tmp_path):
    """Runs the script's main in this process; returns its folder."""

    def train(name, *flags):
        words = ["--output_dir", tmp_path / name, *flags]
        assert run_many.run("gradient_accumulation", words) is None
        return tmp_path / name

    return train


@pytest.mark.slow
def test_five_micro_batches_on_two_processes_equal_the_whole_batch(launcher, train, small_mnist):
    data = ["--dataset", small_mnist, *FLAGS]
    accumulated = ["--gradient_accumulation_steps", 5, "--output_dir", "accumulated"]
    words = run_many.words("gradient_accumulation", [*data, *accumulated])
    launcher("cpu_ddp", *words, script=count_all_reduces.FILE)
    folder = launcher.folder / "accumulated"
    (launch,) = run_reader.launches(folder)
    assert launch["gradient_accumulation_steps"] == 5

    assert summary(folder)["gradient_all_reduces"] == 5  # one per step
    assert largest_difference(train("whole", *data), folder) <= 1e-10


@pytest.mark.parametrize("max_grad_norm", [0, 0.05])
def test_it_is_the_plain_loop(train, small_mnist, float64, max_grad_norm):
    """Weights, learning rates and test of a PyTorch loop on whole batches; BatchNorm is tested
    with its running statistics."""
    flags = ["--dataset", small_mnist, "--batch_size", 250, "--max_steps", 3, "--log_every", 1]
    flags += ["--float64", "--norm", "batch", "--seed", 4, "--weight_decay", 0.5]
    folder = train("run", *flags, "--max_grad_norm", max_grad_norm)
    data, test = load_images(str(small_mnist))
    torch.manual_seed(4)
    model = CellNet(1, 10, norm="batch")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 3, cycle_momentum=False)
    steps = itertools.islice(batches_of(len(data), 250, seed=4), 3)
    losses = (losses_and_predictions(model, *data[rows])[0].mean() for _, rows in steps)
    norms = []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))

    assert_same_as_plain(folder, model, losses, optimizer, schedule, clip, rtol=1e-6, atol=1e-9)
    assert min(norms) > 0.05  # all of them are clipped
    model.eval()
    with torch.no_grad():
        losses, predicted = losses_and_predictions(model, *test.tensors)
    (tested,) = lines(folder, "test")
    assert tested["loss"] == pytest.approx(losses.mean().item(), rel=1e-9)
    assert tested["accuracy"] == pytest.approx((predicted == test.tensors[1]).double().mean().item())


def test_the_gradient_of_a_step_is_clipped_and_not_that_of_a_micro_batch(train, small_mnist):
    flags = ["--dataset", small_mnist, "--batch_size", 250, "--max_steps", 2, "--log_every", 1, "--float64"]
    flags += ["--max_grad_norm", 0.05, "--gradient_accumulation_steps"]
    assert largest_difference(train("four", *flags, 4), train("one", *flags, 1)) <= 1e-10


def test_samples_of_different_length_count_by_their_cells(train, small_mnist, float64):
    """A step of accumulation is that of the mean over all cells with ink, and not of a mean of means."""
    flags = ["--dataset", small_mnist, "--batch_size", 250, "--max_steps", 1, "--log_every", 1, "--float64"]
    flags += ["--variable_length", "--max_grad_norm", 0, "--gradient_accumulation_steps", 6, "--weight_decay", 0]
    folder = train("run", *flags)
    data, _ = load_images(str(small_mnist))
    order, _ = GlobalSampler(len(data), 250, seed=0).items(0)
    images, labels = data[order[:250]]
    torch.manual_seed(0)
    model = CellNet(1, 10, variable_length=True)
    ink = ink_cells(images)
    (trained,) = lines(folder, "train")  # where each image counts once
    assert trained["loss"] == pytest.approx(losses_and_predictions(model, images, labels)[0].mean().item(), rel=1e-9)
    cell_labels = labels[:, None].expand(ink.shape)
    torch.nn.functional.cross_entropy(model(images)[ink], cell_labels[ink]).backward()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2, weight_decay=0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 1, cycle_momentum=False)
    optimizer.step()
    weights = run_reader.weights(folder)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-7, atol=1e-10)
