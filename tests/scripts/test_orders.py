"""examples/orders.py: orders of a user's own keep the promises."""

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from run_reader import lines
from same_numbers import largest_difference

from examples import orders

SCRIPT = ROOT / "examples" / "orders.py"
ORDERS = ["balanced", "several_per_class", "similar_length", "in_windows"]
LABELS = torch.tensor([0] * 60 + [1] * 30 + [2] * 7)


def test_balanced_draws_all_classes_equally_often():
    drawn = torch.cat([LABELS[orders.balanced(LABELS)(epoch)] for epoch in range(100)])
    assert (drawn.bincount() / len(drawn)).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)


def test_groups_have_one_class_and_no_sample_twice():
    order = orders.several_per_class(LABELS, 4)(0)
    assert len(order) == len(order.unique()) == 60 + 28 + 4
    assert (LABELS[order].view(-1, 4) == LABELS[order].view(-1, 4)[:, :1]).all()


def test_batches_of_similar_length_need_less_padding():
    torch.manual_seed(0)
    lengths = torch.randint(5, 40, (100,))
    order = orders.similar_length(lengths, 16)(0)
    assert sorted(order.tolist()) == list(range(100))
    paddings = []
    for indices in (order, torch.randperm(100)):
        batches = lengths[indices][:96].view(-1, 16)
        paddings.append(int((batches.max(1, keepdim=True).values - batches).sum()))
    assert paddings[0] < 0.3 * paddings[1]


def test_a_window_reads_from_few_places_and_is_shuffled_within():
    assert sorted(orders.in_windows(1003, 128)(0).tolist()) == list(range(1003))
    order = orders.in_windows(1024, 128, blocks=16)
    items = order(0)
    assert not torch.equal(items, order(1))
    for window in items.split(128):
        assert len((window // 8).unique()) == 16
        assert (window.diff().abs() < 8).float().mean() < 0.3  # a neighbour is in the same block by chance only


@pytest.fixture(scope="module")
def runs(shared_launcher):
    """Each order on one process, on two, and there resumed from step 3."""
    top = shared_launcher.folder
    flags = ["--float64", "--checkpoint_every", 3, "--keep_checkpoints", 0]
    words = []
    for name in ORDERS:
        own = [*flags, "--order", name]
        assert run_many.run(str(SCRIPT), [*own, "--output_dir", top / name / "one"]) is None
        two, again = top / name / "two", top / name / "resumed"
        words.append(["--script", SCRIPT, *own, "--gradient_accumulation_steps", 2, "--output_dir", two])
        back = ["--back_to", two, 3, again]
        words.append(
            ["--script", SCRIPT, *back, *own, "--gradient_accumulation_steps", 2, "--resume", "--output_dir", again]
        )
    shared_launcher("cpu_ddp", *run_many.words("mlp", *words), script=run_many.FILE)
    return top


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_the_same_on_any_topology_and_when_resumed(runs, name):
    assert largest_difference(runs / name / "one", runs / name / "two") <= 1e-12
    assert run_reader.launches(runs / name / "resumed")[1]["from_step"] == 3
    assert lines(runs / name / "resumed") == lines(runs / name / "two")
    assert run_reader.final_models(runs / name / "resumed") == run_reader.final_models(runs / name / "two")
    rare = [line["rare"] for line in lines(runs / name / "one", "train")]
    assert sum(rare) / len(rare) == pytest.approx(1 / 3 if name == "balanced" else 0.1, abs=0.05)
