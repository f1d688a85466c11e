"""Means over all samples of all processes, in which each sample counts once."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from fakes import fake_accelerator

from utils import metrics, sample_metrics
from utils.layout import Layout
from utils.loader import Batch
from utils.metrics import Metrics, exact_sum
from utils.sample_metrics import gather_samples


@pytest.fixture
def accelerator():
    return fake_accelerator(2)  # the other rank has no samples


class Samples:
    """Of a Batch, what Metrics ask it for."""

    counted = Batch.counted

    def __init__(self, indices, weights=None, is_stand_in=False):
        self.indices = torch.as_tensor(indices, dtype=torch.int64)
        self.weights, self.is_stand_in = weights, is_stand_in

    def __len__(self):
        return len(self.indices)


def over(threads, monkeypatch, processes, function):
    """What `function(rank, accelerator)` returns on each of some processes."""
    for module in (metrics, sample_metrics):
        monkeypatch.setattr(module, "gather_object", lambda mine: [*itertools.chain(*threads.exchange(mine))])
    return threads.run(processes, lambda rank: function(rank, fake_accelerator(processes, rank)))


def test_an_exact_sum_depends_neither_on_the_order_nor_on_the_parts():
    generator = np.random.default_rng(0)
    terms = [*(generator.standard_normal(500) * 10.0 ** generator.integers(-20, 20, 500)), 1e300, -1e300]
    expected = exact_sum(terms)
    assert expected[0] == math.fsum(terms)
    assert sum(map(Fraction, expected)) == sum(map(Fraction, terms))
    for _ in range(10):
        generator.shuffle(terms)
        cuts = sorted(generator.integers(0, len(terms), 3))
        parts = [exact_sum(part.tolist()) for part in np.split(terms, cuts)]
        assert exact_sum([*itertools.chain(*parts)]) == expected
    assert exact_sum([1.0, -1.0]) == exact_sum([]) == []
    assert exact_sum([1.0, math.inf]) == [math.inf]
    assert [math.isnan(part) for part in exact_sum([math.inf, 1.0, -math.inf])] == [True]


def micro_batches(steps, slots):
    """By step and slot: a Batch of 3 to 5 samples, its losses, hits and weights; the last slot has a stand-in once."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for slot in range(slots):
            n = 3 + (step + slot) % 3
            weights = torch.randint(0, 9, (n,), generator=generator)
            batch = Samples(torch.arange(n), weights, (step, slot) == (steps - 1, slots - 1))
            losses = torch.rand(n, generator=generator).masked_fill(weights == 0, torch.nan)
            yield step, slot, batch, losses, torch.rand(n, generator=generator) < 0.5


@pytest.mark.parametrize("most_rows", [2, 512])
def test_the_same_bits_on_any_number_of_processes_and_when_resuming_on_another(threads, monkeypatch, most_rows):
    """6 micro-batches a step, as with --virtual_processes 6. The second metric is one of two processes' or steps'."""
    monkeypatch.setattr(metrics, "MOST_ROWS", most_rows)
    everything = list(micro_batches(7, 6))

    def train(steps, saved=None, reduce=True):
        def on(rank, accelerator):
            stats = Metrics(accelerator, saved)
            for step, slot, batch, losses, hits in everything:
                if step in steps and slot * accelerator.num_processes // 6 == rank:
                    stats.add(batch, loss=losses, step=step)
                    if slot > 3 and step % 2:
                        stats.add(batch, hit=hits)
            return stats.reduce() if reduce else stats.state()

        return on

    counted = [entry for entry in everything if not entry[2].is_stand_in]
    losses = torch.cat([losses for *_, losses, _ in counted]).double()
    weights = torch.cat([batch.weights for _, _, batch, *_ in counted])
    hits = torch.cat([hits for step, slot, *_, hits in counted if slot > 3 and step % 2])
    expected = over(threads, monkeypatch, 1, train(range(7)))[0]
    assert expected["loss"] == pytest.approx(float((losses * weights).nansum() / weights.sum()), rel=1e-14)
    assert (expected["hit"], expected["samples"]) == (hits.double().mean(), len(losses))
    for before, after in itertools.product((1, 2, 3), repeat=2):
        states = over(threads, monkeypatch, before, train(range(4), reduce=False))
        assert states == states[:1] * before
        saved = json.loads(json.dumps(states[0], allow_nan=False))
        assert over(threads, monkeypatch, after, train(range(4, 7), saved)) == [expected] * after
        assert over(threads, monkeypatch, after, train([], saved, reduce=False)) == states[:1] * after


@pytest.mark.parametrize(("test_after", "when"), [(None, "in step 3"), (40, "in the test after step 40")])
def test_one_bad_sample_on_one_of_two_processes_stops_both(threads, monkeypatch, capsys, test_after, when):
    def on(rank, accelerator):
        stats = Metrics(accelerator, test_after=test_after)
        for step in range(600):  # more than are added up at a time
            losses = torch.tensor([0.5, 0.25])
            losses[1] = torch.nan if (rank, step) == (1, 3) else 0.25
            stats.add(Samples([4 * step + 2 * rank, 4 * step + 2 * rank + 1]), loss=losses, step=step)
        with pytest.raises(SystemExit) as stopped:
            stats.reduce()
        return stopped.value.code

    monkeypatch.setattr(metrics, "stop", stop_each)
    assert over(threads, monkeypatch, 2, on) == [2, 2]
    sentence = f"the loss is not finite {when}, for 1 sample with these indices in the data: 15; "
    assert capsys.readouterr().out.count(sentence) == 2


def stop_each(sentence):
    print(sentence)
    raise SystemExit(2)


def test_a_long_test_keeps_few_of_its_values(accelerator):
    stats = Metrics(accelerator, test_after=0)
    for index in range(600):
        stats.add(Samples([index]), loss=index)
        assert len(stats.rows) < metrics.MOST_ROWS
    assert stats.reduce() == {"loss": 299.5, "samples": 600}


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        # Each sample counts the same, whatever its batch.
        ([(Samples(range(4)), torch.full((4,), 0.5)), (Samples([7]), torch.tensor([2.0]))], 0.8),
        # A stand-in counts nothing, whatever its loss is.
        ([(Samples([0, 1]), torch.tensor([1.0, 2.0])), (Samples([0], None, True), torch.tensor([torch.nan]))], 1.5),
        # Weights are those of the batch, if it has some.
        ([(Samples([0, 1], torch.tensor([3.0, 1.0])), torch.tensor([1.0, 4.0]))], 1.75),
        # A scalar is the mean of the batch, weighted as it is.
        ([(Samples([0, 1]), torch.tensor(3.0)), (Samples([2]), torch.tensor(6.0))], 4),
        # What has no weight may be nan, as transformers' mean loss of texts that have no token to predict.
        ([(Samples([0, 1], torch.tensor([1, 3])), 2.0), (Samples([2], torch.tensor([0])), math.nan)], 2),
        # float32 is added in float64.
        ([(Samples(range(100_000)), torch.full((100_000,), 0.1))], pytest.approx(float(np.float32(0.1)), rel=1e-14)),
    ],
)
def test_the_mean_loss_of_batches(accelerator, batches, expected):
    stats = Metrics(accelerator)
    for batch, losses in batches:
        stats.add(batch, loss=losses)
    samples = sum(len(batch) for batch, _ in batches if not batch.is_stand_in)
    assert stats.reduce() == {"loss": expected, "samples": samples}
    assert stats.state() == {"samples": 0, "sums": {}}


def test_losses_have_the_weights_of_the_batch_and_other_metrics_count_samples(accelerator):
    """A sentence of 1 token, which is right, and one of 9, which is not."""
    stats = Metrics(accelerator)
    batch = Samples([0, 1], torch.tensor([1, 9]))
    losses, is_right = torch.tensor([1.0, 3.0]), torch.tensor([True, False])
    stats.add(batch, loss=losses, text_loss=losses, exact_match=is_right)
    stats.add(batch, token_match=is_right, weights=batch.weights)
    stats.add(batch, other_loss=losses, weights=torch.tensor([0, 2]))
    expected = {"loss": 2.8, "other_loss": 3.0, "text_loss": 2.8, "exact_match": 0.5, "token_match": 0.1, "samples": 2}
    assert stats.reduce() == expected


def test_a_mean_over_no_weight_is_nan_and_does_not_stop(accelerator):
    stats = Metrics(accelerator)
    stats.add(Samples([0, 1], torch.zeros(2)), loss=torch.ones(2))
    means = stats.reduce()
    assert math.isnan(means["loss"])
    assert means["samples"] == 2
    assert Metrics(accelerator).reduce() == {"samples": 0}


def test_each_metric_has_its_own_samples_and_weights(accelerator, monkeypatch):
    """A loss per task: other names in each step, on each rank, or in a second call for the same batch."""
    another = {"of_another_rank": [[], []]}, 0, []
    monkeypatch.setattr(metrics, "gather_object", lambda mine: [another, *mine])
    stats = Metrics(accelerator)
    stats.add(Samples([1, 2]), b_loss=torch.tensor([1.0, 2.0]))
    batch = Samples([3, 4, 5])
    stats.add(batch, accuracy=torch.tensor([1.0, 7.0, 0.0]), weights=torch.tensor([1.0, 0.0, 3.0]))
    stats.add(batch, a_loss=4.0, weights=torch.tensor([1.0, 1.0, 0.0]))
    with pytest.raises(ValueError, match="metric accuracy is added twice for one batch"):
        stats.add(batch, accuracy=torch.tensor([1.0, 7.0, 0.0]))
    stats = Metrics(accelerator, json.loads(json.dumps(stats.state(), sort_keys=True)))
    stats.add(Samples([6]), b_loss=torch.tensor([6.0]), accuracy=torch.tensor([True]))
    means = stats.reduce()
    assert math.isnan(means.pop("of_another_rank"))
    assert means == {"a_loss": 4, "b_loss": 3, "accuracy": 2 / 5, "samples": 6}
    assert list(means) == ["a_loss", "b_loss", "accuracy", "samples"]


def test_a_rank_that_adds_nothing_stops_the_run(accelerator, monkeypatch):
    """`if accelerator.is_main_process: run.log_train(...)` would log the samples of one rank."""
    monkeypatch.setattr(metrics, "gather_object", lambda mine: [*mine, ({}, 0, [])])
    assert Metrics(accelerator).reduce() == {"samples": 0}
    saved = {"samples": 1, "sums": {"loss": [["1.0"], ["1.0"]]}}
    assert Metrics(accelerator, saved).state() == saved  # a stop before the first step after resuming
    stats = Metrics(accelerator)
    stats.add(Samples([1]), loss=1.0)
    with pytest.raises(SystemExit, match="rank 1 added no metrics"):
        stats.reduce()
    accelerator.layout = Layout(split_batch=False)
    assert stats.reduce() == {"loss": 1, "samples": 1}


def test_values_may_be_of_any_number_type(accelerator):
    stats = Metrics(accelerator)
    values = {
        "array": np.array([1.0, 2.0]),
        "list": [True, False],
        "number": 0.5,
        "bfloat16": torch.tensor([-1.5, -0.5], dtype=torch.bfloat16),
        "value:odd": torch.tensor([2**40 + 1, 2**40 + 3]),  # beyond float32
    }
    stats.add(Samples([0, 1]), **values)
    restored = Metrics(accelerator, stats.state())
    expected = {"array": 1.5, "list": 0.5, "number": 0.5, "bfloat16": -1.0, "value:odd": 2**40 + 2, "samples": 2}
    assert stats.reduce() == restored.reduce() == expected


@pytest.mark.parametrize("shape", [(1,), (2, 1), (3,)])
def test_a_wrong_shape_is_named(accelerator, shape):
    stats = Metrics(accelerator)
    with pytest.raises(ValueError, match=r"metric error_px of shape .* for 2 samples"):
        stats.add(Samples([0, 1]), loss=torch.ones(2), error_px=torch.ones(shape))
    with pytest.raises(ValueError, match=r"weights of shape .* for 2 samples"):
        stats.add(Samples([0, 1]), loss=torch.ones(2), weights=torch.ones(shape))
    assert stats.reduce() == {"samples": 0}  # nothing is left half counted


@pytest.mark.parametrize("name", ["split", "epoch", "samples", "lr", "samples_per_s"])
def test_a_taken_name_is_refused(accelerator, name):
    with pytest.raises(ValueError, match=f"a metric cannot be named {name}"):
        Metrics(accelerator).add(Samples([0]), **{name: torch.ones(1)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", ["reduce", "state"])
@pytest.mark.parametrize("name", ["loss", "box_loss"])
def test_a_bad_loss_names_its_step_and_samples(accelerator, stops, bad, call, name):
    stats = Metrics(accelerator)
    stats.add(Samples([1, 2]), step=4, **{name: torch.tensor([0.1, 0.2])})
    stats.add(Samples([11, 22, 33]), step=5, **{name: torch.tensor([1.0, bad, bad])})
    stats.add(Samples([44]), step=6, **{name: torch.tensor([bad])})
    error = stops(getattr(stats, call))
    assert f"the {name} is not finite in step 5, for 2 samples with these indices in the data: " in error
    assert "data: 33, ...;" in error or "data: 22, ...;" in error  # one of each micro-batch


def test_a_bad_weight_of_a_loss_names_its_samples(accelerator, stops):
    stats = Metrics(accelerator)
    weights = torch.tensor([1.0, float("inf"), 1.0])
    stats.add(Samples([4, 5, 6]), loss=torch.ones(3), weights=weights)
    assert "for 1 sample with these indices in the data: 5;" in stops(stats.reduce)


def test_only_losses_must_be_finite(accelerator):
    stats = Metrics(accelerator)
    stats.add(Samples([0, 1]), loss=torch.ones(2), gap=torch.tensor([1.0, float("inf")]))
    stats = Metrics(accelerator, json.loads(json.dumps(stats.state(), allow_nan=False)))
    assert stats.reduce() == {"loss": 1.0, "gap": float("inf"), "samples": 2}
    assert [metrics.is_loss(n) for n in ("loss", "a_loss", "lossless", "gloss")] == [True, True, False, False]


def test_a_gradient_that_would_end_in_gather_samples_is_an_error(accelerator):
    """On one process the loss would train; on two, backward fails."""
    with pytest.raises(ValueError, match="requires grad"):
        gather_samples(accelerator, [torch.ones(2), torch.ones(1, requires_grad=True)])


@pytest.mark.parametrize("convert", [lambda part: part, lambda part: part.double()[:, None] / 7, lambda part: part > 0])
def test_samples_of_three_processes_are_in_the_order_of_the_ranks(threads, monkeypatch, convert):
    """Of integers, rows and bools; rank 1 has none."""
    parts = [[torch.tensor([-1, 2]), torch.tensor([-3, -4])], [torch.zeros(0, dtype=torch.int64)], [torch.tensor([5])]]

    def on(rank, accelerator):
        return gather_samples(accelerator, [convert(part) for part in parts[rank]])

    for found in over(threads, monkeypatch, 3, on):
        torch.testing.assert_close(found, convert(torch.tensor([-1, 2, -3, -4, 5])), rtol=0, atol=0)
