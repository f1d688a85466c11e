"""examples/orders.py: what its orders are; test_users_programs.py trains with them."""

import pytest
import torch

from examples import orders

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
