import socket
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils import metrics


@pytest.fixture
def accelerator():
    return SimpleNamespace(device=torch.device("cpu"), reduce=lambda tensor, kind: tensor)


def filled(accelerator, losses, step=0):
    stats = metrics.SampleStats(accelerator)
    losses = torch.tensor(losses)
    stats.add(losses, losses < 1, torch.arange(len(losses)) + 100, step)
    return stats


def test_every_sample_weighs_the_same_whatever_its_batch(accelerator):
    stats = filled(accelerator, [0.5, 0.5, 0.5, 0.5])
    stats.add(torch.tensor([2.0]), torch.tensor([False]), torch.tensor([7]))
    assert stats.reduce() == {"loss": pytest.approx(0.8), "accuracy": 0.8, "samples": 5}  # not (0.5 + 2) / 2
    assert stats.losses == []


def test_float32_losses_are_summed_in_float64(accelerator):
    stats = filled(accelerator, [0.1] * 100_000)
    assert stats.reduce()["loss"] == pytest.approx(float(np.float32(0.1)), rel=1e-14)


def test_an_empty_share_counts_nothing(accelerator):
    stats = filled(accelerator, [1.0, 2.0])
    stats.add(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert stats.reduce()["samples"] == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("call", ["reduce", "check"])
def test_a_bad_loss_names_its_step_and_samples(accelerator, capsys, bad, call):
    stats = filled(accelerator, [0.1, 0.2], step=4)
    stats.add(torch.tensor([1.0, bad, bad]), torch.ones(3, dtype=torch.bool), torch.tensor([11, 22, 33]), 5)
    stats.add(torch.tensor([bad]), torch.ones(1, dtype=torch.bool), torch.tensor([44]), 6)
    with pytest.raises(SystemExit):
        getattr(stats, call)()
    error = capsys.readouterr().err
    assert "not finite at step 5, for 2 samples" in error
    assert ": 22, 33;" in error


def test_state_is_restored_bit_by_bit(accelerator):
    stats = filled(accelerator, [0.1, 0.7, 3.0], step=3)
    stats.add(torch.tensor([0.3]), torch.tensor([True]), torch.tensor([7]), 4)
    other = metrics.SampleStats(accelerator, stats.state())
    assert all(torch.equal(other.state()[name], tensor) for name, tensor in stats.state().items())
    assert other.state()["steps"].tolist() == [3, 3, 3, 4]
    assert other.reduce() == stats.reduce()
    assert metrics.SampleStats(accelerator, {}).state() == {}


def test_classification_metric_needs_no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    metric = metrics.classification_metric(3)
    for predictions, references in (([0, 0, 1], [0, 1, 1]), ([1], [1])):
        metric.add_batch(predictions=predictions, references=references)
    result = metric.compute()
    assert result["accuracy"] == 0.75
    assert result["confusion"] == [[1, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert result["f1_macro"] == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)  # class 2 never occurs: 0


def test_gathering_keeps_each_prediction_once():
    accelerator = SimpleNamespace(
        pad_across_processes=lambda tensor, pad_index: torch.cat([tensor, torch.tensor([pad_index])]),
        gather=lambda tensor: torch.cat([tensor, torch.tensor([5, 0, 6])]),
    )
    gathered = metrics.gather_predictions(accelerator, [torch.tensor([0, 1]), torch.tensor([2])])
    assert gathered.tolist() == [0, 1, 2, 5, 0, 6]
