"""Processes whose weights or test results drift apart stop, and what differs is named."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from fakes import fake_accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils import agree
from utils.parallel import same_state
from utils.parallel.data_parallel import fix_buckets


@pytest.fixture
def compared(capsys, monkeypatch):
    """What is said if rank 1 of 2 has the first models, and rank 0 the second."""

    def compare(theirs, ours, warned=None, is_first=False, **more):
        gathered, warned = [], set() if warned is None else warned
        monkeypatch.setattr(agree, "gather_object", lambda mine: gathered.extend(mine) or gathered[::-1])
        for rank, models in ((1, theirs), (0, ours)):
            accelerator = fake_accelerator(2, rank=rank, sharded_calls=0, **more)
            same_state.check(accelerator, models, warned, is_first)
        captured = capsys.readouterr()
        return captured.out + captured.err

    return compare


def pair_of_models(dtype=torch.float32):
    return {name: nn.Linear(3, 2, dtype=dtype) for name in ("generator", "discriminator")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
def test_one_bit_of_one_weight_of_the_second_model_is_found(compared, capsys, dtype):
    ours = pair_of_models(dtype)
    theirs = copy.deepcopy(ours)
    assert compared(theirs, ours) == ""
    weight = theirs["discriminator"].weight.data
    bits = (torch.view_as_real(weight) if dtype.is_complex else weight).view(torch.int8).view(-1)
    bits[-weight.element_size()] ^= 1  # the lowest bit of a number, by little-endian order
    with pytest.raises(SystemExit):
        compared(theirs, ours)
    assert "different weights: discriminator.weight differs between rank 0 and rank 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "virtual", "is_refused"),
    [
        (None, 0, True),  # no DDP: a moving average, or a model without parameters to train
        ({}, 0, False),  # the next forward pass begins with rank 0's
        ({"broadcast_buffers": False}, 0, True),
        ({}, 4, True),
    ],
)
def test_buffers_that_differ_are_named_and_stop_the_run_if_no_forward_pass_makes_them_equal(
    compared, capsys, options, virtual, is_refused
):
    ours = nn.Sequential(nn.BatchNorm1d(3))
    ours[0].weight.data[0] = math.nan
    theirs = copy.deepcopy(ours)
    theirs[0].running_mean.fill_(7)
    warned = set()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pair = [ours, theirs] if options is None else [DistributedDataParallel(m, **options) for m in (ours, theirs)]
        models = {"model": pair[1]}, {"model": pair[0]}
        with pytest.raises(SystemExit) if is_refused else contextlib.nullcontext():
            said = compared(*models, warned=warned, virtual_processes=virtual)
            assert "warning: model.0.running_mean differs between processes" in said
            assert compared(*models, warned=warned, virtual_processes=virtual) == ""  # once
    finally:
        dist.destroy_process_group()
    said = capsys.readouterr().err
    assert ("model.0.running_mean differs between rank 0 and rank 1" in said) is is_refused


def test_buffers_that_no_checkpoint_has_are_compared_after_the_first_step_where_their_shape_is_the_same(compared):
    """One that grows with the samples is a cache; one that differs later may be that of a test."""
    ours = nn.Linear(1, 1)
    ours.register_buffer("mean", torch.zeros(1), persistent=False)
    ours.register_buffer("cache", torch.zeros(1), persistent=False)
    theirs = copy.deepcopy(ours)
    theirs.mean.fill_(1)
    theirs.cache = torch.ones(2)
    models = {"model": theirs}, {"model": ours}
    assert compared(*models) == ""
    assert "warning: model.mean differs between processes" in compared(*models, is_first=True)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"loss": 0.5, "f1": math.nan}, ""),
        ({"loss": 0.5 + 1e-7, "f1": math.nan}, ""),  # rounding, on another kind of machine
        ({"loss": 0.5002, "f1": math.nan}, "loss 0.5002, not 0.5"),
        ({"loss": math.nan, "f1": math.nan}, "loss nan, not 0.5"),
        ({"loss": 0.5, "f1": 0.0}, "f1 0.0, not nan"),
        ({"loss": 0.5}, "f1 None, not nan"),
    ],
)
def test_numbers_of_a_test_are_the_same_up_to_rounding(monkeypatch, capsys, theirs, said):
    ours = {"loss": 0.5, "f1": math.nan}
    monkeypatch.setattr(agree, "gather_object", lambda mine: [("alpha", ours), *mine])
    with pytest.raises(SystemExit) if said else contextlib.nullcontext():
        assert agree.same_result(theirs) is ours  # also on rank 1
    assert said in capsys.readouterr().err


def test_embeddings_with_sparse_gradients_are_averaged_by_ddp():
    model = nn.Sequential(nn.EmbeddingBag(5, 2, mode="sum", sparse=True), nn.Linear(2, 1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        fix_buckets(replica)
        replica(torch.tensor([[1, 3]])).sum().backward()
    finally:
        dist.destroy_process_group()
    gradient = model[0].weight.grad.to_dense()
    assert gradient[1].equal(model[1].weight[0])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [1, 3]
