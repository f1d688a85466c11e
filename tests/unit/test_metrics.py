"""Means over all samples of all processes, in which each sample counts once."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT, free_port
from fakes import fake_accelerator

from utils import metrics
from utils.loader import Batch
from utils.metrics import Metrics
from utils.parallel.gather_samples import gather_samples
from utils.topology import Layout


@pytest.fixture
def accelerator():
    return fake_accelerator(2)  # the other rank has no samples


def batch_of(indices, weights=None):
    class Samples:
        def __init__(self):
            self.indices = torch.tensor(indices, dtype=torch.int64)
            self.weights = weights

        is_stand_in = False
        counted = Batch.counted

        def __len__(self):
            return len(self.indices)

    return Samples()


def filled(accelerator, losses, step=0):
    stats = Metrics(accelerator)
    losses = torch.tensor(losses)
    batch = batch_of(range(100, 100 + len(losses)))
    stats.add(batch, loss=losses, accuracy=losses < 1, step=step)
    return stats


def test_virtual_processes_have_the_sum_of_the_real_numbers_in_any_order(accelerator):
    accelerator.layout = Layout(virtual_processes=4)
    losses, weights = [1e17, 1.0, -1e17, 3.0], torch.tensor([1, 2, 1, 4])
    for order in ([0, 1, 2, 3], [3, 0, 1, 2], [1, 0, 2, 3]):
        stats = Metrics(accelerator)
        for place in order:
            batch = batch_of([place], weights[[place]])
            stats.add(batch, loss=torch.tensor([losses[place]], dtype=torch.float64))
        assert stats.reduce() == {"loss": 14 / 8, "samples": 4}
    stats.add(batch_of([5]), loss=torch.tensor([math.inf]), step=3)
    with pytest.raises(SystemExit):
        stats.check()


def test_every_sample_counts_the_same_whatever_its_batch(accelerator):
    stats = filled(accelerator, [0.5, 0.5, 0.5, 0.5])
    stats.add(batch_of([7]), loss=torch.tensor([2.0]), accuracy=torch.tensor([False]))
    means = {"loss": pytest.approx(0.8), "accuracy": 0.8, "samples": 5}  # not (0.5 + 2) / 2
    assert stats.reduce() == means
    assert stats.state() == {}


def test_losses_have_the_weights_of_the_batch_and_other_metrics_count_samples(accelerator):
    """A sentence of 1 token, which is right, and one of 9, which is not."""
    stats = Metrics(accelerator)
    batch = batch_of([0, 1], torch.tensor([1, 9]))
    losses, is_right = torch.tensor([1.0, 3.0]), torch.tensor([True, False])
    stats.add(batch, loss=losses, text_loss=losses, exact_match=is_right)
    stats.add(batch, token_match=is_right, weights=batch.weights)
    assert stats.reduce() == {"loss": 2.8, "text_loss": 2.8, "exact_match": 0.5, "token_match": 0.1, "samples": 2}


def test_weights_of_the_call_replace_those_of_the_batch(accelerator):
    losses = torch.tensor([1.0, 4.0])
    stats = Metrics(accelerator)
    stats.add(batch_of([0, 1], torch.tensor([3.0, 1.0])), loss=losses)
    assert stats.reduce() == {"loss": 1.75, "samples": 2}
    stats.add(batch_of([0, 1], torch.tensor([3.0, 1.0])), loss=losses, weights=torch.tensor([0, 2]))
    stats.add(batch_of([2, 3]), loss=losses)
    assert stats.reduce() == {"loss": (2 * 4 + 1 + 4) / 4, "samples": 4}


def test_float32_losses_are_summed_in_float64(accelerator):
    stats = filled(accelerator, [0.1] * 100_000)
    assert stats.reduce()["loss"] == pytest.approx(float(np.float32(0.1)), rel=1e-14)


def test_a_stand_in_counts_nothing_whatever_its_loss_is(accelerator):
    stats = filled(accelerator, [1.0, 2.0])
    batch = batch_of([0])
    batch.is_stand_in = True
    stats.add(batch, loss=torch.tensor([torch.nan]), accuracy=torch.ones(1, dtype=torch.bool))
    assert stats.reduce() == {"loss": 1.5, "accuracy": 0, "samples": 2}


def test_a_mean_over_no_weight_is_nan_and_does_not_stop(accelerator):
    stats = Metrics(accelerator)
    stats.add(batch_of([0, 1], torch.zeros(2)), loss=torch.ones(2))
    means = stats.reduce()
    assert math.isnan(means["loss"])
    assert means["samples"] == 2
    assert Metrics(accelerator).reduce() == {"samples": 0}


def test_what_has_no_weight_does_not_count_even_if_it_is_nan(accelerator):
    """A micro-batch of texts without a masked token: transformers' mean loss over none is nan."""
    stats = Metrics(accelerator)
    stats.add(batch_of([0, 1], torch.tensor([1, 3])), loss=torch.tensor(2.0), hit=torch.tensor([True, False]))
    stats.add(batch_of([2], torch.tensor([0])), loss=torch.tensor(torch.nan), hit=torch.tensor([True]))
    assert stats.reduce() == {"loss": 2.0, "hit": 2 / 3, "samples": 3}


def test_values_are_kept_without_their_graph(accelerator):
    stats = Metrics(accelerator)
    losses = torch.ones(2, requires_grad=True) * 2
    stats.add(batch_of([0, 1]), loss=losses)
    assert not stats.rows["loss"][0]["value"].requires_grad


@pytest.mark.parametrize("virtual", [0, 4])
def test_each_metric_has_its_own_samples_and_weights(accelerator, monkeypatch, virtual):
    """A loss per task: other names in each step, on each rank, or in a second call for the same batch."""
    accelerator.layout = Layout(virtual_processes=virtual)
    monkeypatch.setattr(metrics, "gather_object", lambda names: [["of_another_rank"], *names])
    stats = Metrics(accelerator)
    stats.add(batch_of([1, 2]), b_loss=torch.tensor([1.0, 2.0]))
    batch = batch_of([3, 4, 5])
    stats.add(batch, accuracy=torch.tensor([1.0, 7.0, 0.0]), weights=torch.tensor([1.0, 0.0, 3.0]))
    stats.add(batch, a_loss=4.0, weights=torch.tensor([1.0, 1.0, 0.0]))
    with pytest.raises(ValueError, match="metric accuracy is added twice for one batch"):
        stats.add(batch, accuracy=torch.tensor([1.0, 7.0, 0.0]))
    stats = Metrics(accelerator, dict(reversed(stats.state().items())))  # from a checkpoint, in any order
    stats.add(batch_of([6]), b_loss=torch.tensor([6.0]), accuracy=torch.tensor([True]))
    means = stats.reduce()
    assert math.isnan(means.pop("of_another_rank"))
    assert means == {"a_loss": 4, "b_loss": 3, "accuracy": 2 / 5, "samples": 6}
    assert list(means) == ["a_loss", "b_loss", "accuracy", "samples"]
    assert stats.state() == {}


def test_a_rank_that_adds_nothing_stops_the_run(accelerator, monkeypatch):
    """`if accelerator.is_main_process: run.log_train(...)` would log the samples of one rank."""
    monkeypatch.setattr(metrics, "gather_object", lambda names: [*names, []])
    assert Metrics(accelerator).reduce() == {"samples": 0}
    with pytest.raises(SystemExit):
        filled(accelerator, [1.0]).reduce()
    accelerator.layout = Layout(split_batch=False)
    stats = Metrics(accelerator)
    stats.add(batch_of([1]), loss=1.0)
    assert stats.reduce() == {"loss": 1, "samples": 1}


def test_values_may_be_of_any_number_type_and_a_scalar_is_the_mean_of_the_batch(accelerator):
    stats = Metrics(accelerator)
    values = {
        "array": np.array([1.0, 2.0]),
        "list": [True, False],
        "number": 0.5,
        "bfloat16": torch.tensor([-1.5, -0.5], dtype=torch.bfloat16),
        "value:odd": torch.tensor([-3, 5]),
    }
    stats.add(batch_of([0, 1]), **values)
    restored = Metrics(accelerator, stats.state())
    expected = {"array": 1.5, "list": 0.5, "number": 0.5, "bfloat16": -1.0, "value:odd": 1.0, "samples": 2}
    assert stats.reduce() == restored.reduce() == expected
    stats.add(batch_of([0, 1]), loss=torch.tensor(3.0))
    stats.add(batch_of([2]), loss=torch.tensor(6.0))
    assert stats.reduce() == {"loss": 4, "samples": 3}


@pytest.mark.parametrize("shape", [(1,), (2, 1), (3,)])
def test_a_wrong_shape_is_named(accelerator, shape):
    stats = Metrics(accelerator)
    with pytest.raises(ValueError, match=r"metric error_px of shape .* for 2 samples"):
        stats.add(batch_of([0, 1]), loss=torch.ones(2), error_px=torch.ones(shape))
    with pytest.raises(ValueError, match=r"weights of shape .* for 2 samples"):
        stats.add(batch_of([0, 1]), loss=torch.ones(2), weights=torch.ones(shape))
    assert stats.reduce() == {"samples": 0}  # nothing is left half counted


@pytest.mark.parametrize("name", ["split", "epoch", "samples", "lr", "samples_per_s"])
def test_a_taken_name_is_refused(accelerator, name):
    with pytest.raises(ValueError, match=f"a metric cannot be named {name}"):
        Metrics(accelerator).add(batch_of([0]), **{name: torch.ones(1)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", ["reduce", "check"])
@pytest.mark.parametrize("name", ["loss", "box_loss"])
def test_a_bad_loss_names_its_step_and_samples(accelerator, capsys, bad, call, name):
    stats = Metrics(accelerator)
    stats.add(batch_of([1, 2]), step=4, **{name: torch.tensor([0.1, 0.2])})
    stats.add(batch_of([11, 22, 33]), step=5, **{name: torch.tensor([1.0, bad, bad])})
    stats.add(batch_of([44]), step=6, **{name: torch.tensor([bad])})
    with pytest.raises(SystemExit):
        getattr(stats, call)()
    error = capsys.readouterr().err
    assert f"the {name} is not finite at step 5, for 2 samples" in error
    assert ": 22, 33;" in error


def test_a_bad_weight_of_a_loss_names_its_samples(accelerator, capsys):
    stats = Metrics(accelerator)
    weights = torch.tensor([1.0, float("inf"), 1.0])
    stats.add(batch_of([4, 5, 6]), loss=torch.ones(3), weights=weights)
    with pytest.raises(SystemExit):
        stats.reduce()
    assert "for 1 samples with these indices in the data: 5;" in capsys.readouterr().err


def test_only_losses_must_be_finite(accelerator):
    stats = Metrics(accelerator)
    stats.add(batch_of([0, 1]), loss=torch.ones(2), gap=torch.tensor([1.0, float("inf")]))
    stats.check()
    assert stats.reduce() == {"loss": 1.0, "gap": float("inf"), "samples": 2}
    assert [metrics.is_loss(n) for n in ("loss", "a_loss", "lossless", "gloss")] == [True, True, False, False]


def test_state_is_restored_bit_by_bit(accelerator):
    stats = filled(accelerator, [0.1, 0.7, 3.0], step=3)
    stats.add(batch_of([7]), loss=torch.tensor([0.3]), accuracy=torch.tensor([True]), step=4)
    other = Metrics(accelerator, stats.state())
    for name, tensor in stats.state().items():
        assert torch.equal(other.state()[name], tensor), name
        assert other.state()[name].dtype == tensor.dtype
    assert other.state()["step:loss"].tolist() == [3, 3, 3, 4]
    for each in (stats, other):
        each.add(batch_of([8]), loss=torch.tensor([0.9]), accuracy=torch.tensor([True]), step=5)
    assert other.state()["step:loss"].tolist() == [3, 3, 3, 4, 5]
    assert other.reduce() == stats.reduce()
    assert Metrics(accelerator, {}).state() == {}


def test_a_gradient_that_would_end_in_gather_samples_is_an_error(accelerator):
    """On one process the loss would train; on two, backward fails."""
    with pytest.raises(ValueError, match="requires grad"):
        gather_samples(accelerator, [torch.ones(2), torch.ones(1, requires_grad=True)])


@pytest.mark.slow
def test_over_three_processes(launcher):
    """Samples in the order of the ranks, one of which has none; a bad loss stops all of them."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", 3, "--master-port", free_port()]
    done = launcher.python(*words, ROOT / "tests" / "programs" / "gather_metrics.py")
    sentence = "error: the loss is not finite at step 9, for 1 samples with these indices in the"
    assert done.stderr.count(f"{sentence} data: 5;") == 1  # said once
