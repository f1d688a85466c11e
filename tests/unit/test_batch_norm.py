"""Running statistics: of PyTorch with one micro-batch per step, and of all micro-batches with several."""

import copy

import pytest
import torch
import torch.distributed as dist
from fakes import fake_accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.accelerator import TrainingAccelerator
from utils.parallel.batch_norm import BatchNorms


@pytest.mark.parametrize(
    ("accumulation", "momentum", "calls"),
    [(1, 0.3, 1), (2, 0.3, 1), (5, 0.3, 1), (2, None, 1), (3, 0.3, 2), (2, None, 3)],
)
def test_each_call_moves_the_statistics_by_the_mean_over_the_micro_batches(accumulation, momentum, calls):
    accelerator = TrainingAccelerator(cpu=True, gradient_accumulation_steps=accumulation)
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    batch_norms = BatchNorms(norm, accelerator)
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    for step in range(3):
        pieces = torch.randn(accumulation, calls, 4, 3, 2, 2, dtype=torch.float64)
        for piece in pieces:
            with accelerator.accumulate(norm), batch_norms.averaged():
                for inputs in piece:
                    norm(inputs)
        for call in range(calls):
            new = momentum or 1 / (step * calls + call + 1)
            mean = (1 - new) * mean + new * pieces[:, call].mean((0, 1, 3, 4))
            variance = (1 - new) * variance + new * pieces[:, call].transpose(1, 2).flatten(2).var(2).mean(0)
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(norm.running_var, variance, rtol=1e-12, atol=1e-14)
        assert norm.num_batches_tracked == (step + 1) * calls


def test_with_one_micro_batch_they_have_the_bits_of_pytorch_in_a_siamese_model_too():
    accelerator = TrainingAccelerator(cpu=True)
    plain = nn.BatchNorm1d(3)
    norm = copy.deepcopy(plain)
    batch_norms = BatchNorms(norm, accelerator)
    for first, second in torch.randn(5, 2, 8, 3) + torch.tensor([[[1.0]], [[-5.0]]]):
        with accelerator.accumulate(norm), batch_norms.averaged():
            norm(first), norm(second)
        plain(first), plain(second)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(norm.state_dict()[name], tensor)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_statistics_and_counts_are_the_same_on_any_number_of_processes(threads, world_size):
    micro_batches = torch.randn(3, 4, 2, 8, 3, dtype=torch.float64)  # steps, micro-batches, calls

    def train(rank):
        accelerator = fake_accelerator(world_size, rank, accumulation=4 // world_size)
        accelerator.reduce = lambda tensor, _: sum(threads.exchange(tensor)) / world_size
        norm = nn.BatchNorm1d(3).double()
        batch_norms = BatchNorms(norm, accelerator)
        for step in micro_batches:
            *others, last = step[rank::world_size]
            for calls in (*others, last):
                accelerator.sync_gradients = calls is last
                with batch_norms.averaged():
                    norm(calls[0]), norm(calls[1])
        return norm.state_dict()

    mean = torch.zeros(3).double()
    for call in micro_batches.mean((1, 3)).flatten(0, 1):
        mean = 0.9 * mean + 0.1 * call
    for state in threads.run(world_size, train):
        torch.testing.assert_close(state["running_mean"], mean, rtol=1e-12, atol=1e-14)
        assert state["num_batches_tracked"] == 6


def test_frozen_statistics_stay_as_they_are():
    accelerator = TrainingAccelerator(cpu=True)
    frozen = nn.BatchNorm1d(3).eval()
    frozen.running_mean.copy_(torch.tensor([0.1, 0.2, 0.3]))
    model = nn.Sequential(nn.BatchNorm1d(3), frozen)
    batch_norms = BatchNorms(model, accelerator)
    with accelerator.accumulate(model), batch_norms.averaged():
        model(torch.randn(8, 3))
    assert torch.equal(frozen.running_mean, torch.tensor([0.1, 0.2, 0.3]))
    assert model[0].running_mean.abs().sum() > 0


def test_ddp_does_not_replace_the_statistics_with_rank_0s(monkeypatch):
    replaced = []
    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", lambda ddp: replaced.append(ddp))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = plain, averaged = [DistributedDataParallel(nn.BatchNorm1d(3)) for _ in range(2)]
        BatchNorms(nn.ModuleList([averaged]), TrainingAccelerator(cpu=True))
        for model in models:
            model(torch.randn(8, 3))
        assert replaced == [plain]
    finally:
        dist.destroy_process_group()


class Counter(nn.Module):
    """A running mean that is replaced, of two dimensions, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.count += 1


def test_other_running_statistics_are_averaged_too():
    """The mean over the micro-batches, each from what the step began with; a count goes on once per step."""
    accelerator = TrainingAccelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(Counter())
    batch_norms = BatchNorms(model, accelerator, Counter)
    x = torch.randn(2, 2, 4, 2, 3, dtype=torch.float64)  # steps, micro-batches, samples
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for step in x:
        for micro_batch in step.float():
            with accelerator.accumulate(model), batch_norms.averaged():
                model(micro_batch)
        expected = 0.5 * expected + 0.5 * step.mean((0, 1))
    torch.testing.assert_close(model.mean.double(), expected, rtol=1e-6, atol=1e-6)
    assert model.count == 2
