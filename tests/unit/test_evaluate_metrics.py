"""Metrics of evaluate take every sample of a test once, in the order of the dataset."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from utils import sample_metrics
from utils.sample_metrics import EvaluateMetrics

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_metrics_of_any_number_of_processes_are_those_of_one(threads, world_size, monkeypatch):
    """Of five samples, F1 of class 0 is 2/3, of class 1 it is 2/5, of class 2 nothing; the last batch has one."""
    labels, predicted = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 1])
    monkeypatch.setattr(sample_metrics, "gather_object", lambda rows: list(chain(*threads.exchange(rows))))
    loaded = [EvaluateMetrics([str(EXAMPLES / "f1_macro")], example=[0, 1]) for _ in range(world_size)]

    def test_twice(rank):
        results = []
        for answers in (predicted, labels):  # the second one does not count the first one's samples
            for indices in torch.arange(5).tensor_split(3):
                part = indices[rank::world_size]
                stand_in = len(part) == 0
                part = indices[:1] if stand_in else part
                batch = SimpleNamespace(indices=part, is_stand_in=stand_in)
                loaded[rank].add(batch, answers[part].tolist(), labels[part].tolist())
            results.append(loaded[rank].compute())
        return results

    for results in threads.run(world_size, test_twice):
        assert results == [{"f1_macro": pytest.approx((2 / 3 + 2 / 5) / 3)}, {"f1_macro": 1.0}]


def test_text_and_several_metrics(tmp_path):
    """Two of eight letters are wrong; the order of the dataset is restored."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "first.py").write_text(
        (EXAMPLES / "character_error_rate" / "character_error_rate.py")
        .read_text()
        .replace('{"character_error_rate": sum(edits(*pair) for pair in pairs) /', '{"first": references[0], "n": 0 *')
    )
    names = [str(EXAMPLES / "character_error_rate"), str(tmp_path / "first")]
    metrics = EvaluateMetrics(names, example=["a"])
    batch = SimpleNamespace(indices=torch.tensor([1, 0]), is_stand_in=False)
    metrics.add(batch, ["abc", "xyzz"], ["abcd", "xyaz"])
    assert metrics.compute() == {"character_error_rate": 0.25, "first": "xyaz", "n": 0}


def test_a_metric_that_cannot_be_used_is_an_error_of_evaluate_before_the_training():
    with pytest.raises(ValueError, match="don't match the expected format"):
        EvaluateMetrics([str(EXAMPLES / "character_error_rate")], example=[0, 1])
