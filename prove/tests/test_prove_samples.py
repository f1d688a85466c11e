"""Samples and random numbers, in records that are made up."""

from dataclasses import replace

import pytest
import torch

from prove_training.records import Draw
from prove_training.stages import Comparison, several, single
from tests.made_up import digests_of, drawn, every_step, found, made_up, scale


def test_samples_that_nothing_is_known_of_are_not_called_the_same():
    """As those of a stream that one process reads for all."""
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps:
            step.micro_batches[0].samples = []
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert ("samples" in both.compared, "samples" in both.not_compared) == (False, True)


@pytest.mark.parametrize(("factor", "kinds"), [(torch.tensor([1.0, 1.0, 1.1, 1.0]), []), (1.01, []), (2.0, ["factor"])])
def test_a_state_of_the_script_may_remember_a_sample_that_was_there_twice(factor, kinds):
    """As running statistics do after the last step of an epoch, which DistributedSampler fills."""
    (reference,), ranks = made_up(), made_up(2)
    ranks[0].steps[1].micro_batches[0].samples[0].digests.append("7")
    for rank in ranks:
        scale(rank.steps[3].gradients, factor)
        rank.steps[3].rates = [0.99 * rate for rate in rank.steps[3].rates]
    both = Comparison(reference, ranks)
    assert [finding.kind for finding in several.findings(both) if finding.kind] == kinds
    assert ("gradients after it" in both.not_compared) == (not kinds)
    ranks[0].steps[1].micro_batches[0].samples[0].digests.pop()
    assert {"gradient", "factor"}.intersection(finding.kind for finding in found(reference, ranks))


def test_a_sample_that_a_step_lacks_does_not_excuse_a_later_gradient():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders["loader"].drop_last = True
    digests_of(ranks[0], 1).digests.pop()
    for rank in ranks:
        scale(rank.steps[3].gradients, torch.tensor([1.0, 1.0, 1.1, 1.0]))
    assert [each.kind for each in several.findings(Comparison(reference, ranks)) if each.kind] == ["gradient"]


@pytest.mark.parametrize(("calls", "kinds"), [(["all_gather"], []), (["all_reduce"], ["gradient"]), ([], ["gradient"])])
def test_a_queue_that_is_gathered_ends_within_a_step_after_a_shorter_one(calls, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        samples = record.steps[1].micro_batches[0].samples[0].digests
        del samples[len(samples) * 2 // 3 :]
        record.facts.loaders["loader"].drop_last = True
    for rank in ranks:
        rank.steps[3].collectives = [(name, "train.py:11") for name in calls]
        scale(rank.steps[3].gradients, torch.tensor([1.0, 1.0, 1.5, 1.0]))
    both = Comparison(reference, ranks)
    assert [finding.kind for finding in several.findings(both) if finding.kind] == kinds
    assert ("gradients after it" in both.not_compared) == (not kinds)


@pytest.mark.parametrize(("same", "kinds"), [(3, ["same_noise"]), (2, [])])
def test_noise_is_the_same_only_if_it_is_in_each_of_three_steps_or_more(same, kinds):
    (reference,), ranks = made_up(), made_up(3)
    for rank in ranks:
        every_step([replace(rank, steps=rank.steps[:same])], drawn=drawn("a"))
    assert [finding.kind for finding in found(reference, ranks)] == kinds
    ranks[2].steps[same].drawn = drawn("after a batch of another length")
    assert [finding.kind for finding in found(reference, ranks)] == kinds
    ranks[2].steps[same - 1].drawn = drawn("another")
    assert found(reference, ranks) == []


def test_batches_without_a_loader_are_compared_if_their_rows_can_be_told_apart():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders = {}
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert both.compared >= {"samples", "gradients"}
    for record, samples in ((reference, "aaaa01"), (ranks[0], "aa0"), (ranks[1], "aa1")):
        for number in range(4):
            digests_of(record, number).digests = [*samples]
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert not both.compared & {"samples", "gradients"}


def test_items_that_ignore_their_index_are_the_same_only_by_equal_generators():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.ignores_index = True
        for number in range(4):
            digests_of(record, number).digests = [str(6 * number + index) for index in range(6)]
        record.passes[0].random = f"state {record.rank}"
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert both.not_compared["samples"].startswith("its items are random numbers")
    ranks[1].passes[0].random = ranks[0].passes[0].random
    assert [each.kind for each in several.findings(Comparison(reference, ranks))] == ["all_the_data"]
    reference.steps += [replace(step) for step in reference.steps]
    for step in reference.steps[4:]:
        micro = step.micro_batches[0]
        step.micro_batches = [replace(micro, samples=[replace(micro.samples[0], number=1)])]
    assert [each.kind for each in single.findings(reference)] == []


def test_numbers_for_a_single_sample_may_be_the_same():
    (reference,), ranks = made_up(), made_up(3)
    every_step(ranks, drawn=[Draw("train.py:8", "randn", "a", 1, is_per_sample=True)])
    assert found(reference, ranks) == []


AGAIN = "randn draws those of step 1 again in step 3 (train.py:8)"


@pytest.mark.parametrize(("states", "said"), [("abababab", AGAIN), ("abcdefab", None), ("abcdefgh", None)])
def test_noise_that_begins_with_one_seed_in_each_epoch_is_not_called_compared(states, said):
    (record,), ranks = made_up(steps=8), made_up(2, steps=8)
    for step, state in zip(record.steps, states, strict=True):
        step.drawn = drawn(state) * 2  # activation checkpointing draws them twice in one step
    both = Comparison(record, ranks)
    assert not any(each.kind for each in several.findings(both))
    assert both.not_compared.get("random numbers") == said


@pytest.mark.parametrize("digests", ["aab", "abb", "abc"])
def test_noise_that_one_of_three_processes_shares_is_not_the_same_on_all(digests):
    (reference,), ranks = made_up(), made_up(3)
    for rank, digest in zip(ranks, digests, strict=True):
        every_step([rank], drawn=drawn(digest))
        rank.steps[1].drawn = drawn("equal in one step")
    assert found(reference, ranks) == []


def test_batches_that_the_script_makes_may_not_overlap():
    def kinds(last: list[str]) -> list[str]:
        (reference,), ranks = made_up(), made_up(2)
        for record in (reference, *ranks):
            record.facts.loaders["loader"].given = None
        for step, samples in zip(ranks[1].steps, (["0", "2", "4"], ["6", "8", "10"], last), strict=False):
            step.micro_batches[0].samples[0].digests = samples
        return [finding.kind for finding in found(reference, ranks)]

    assert kinds(["12", "14", "16"]) == ["samples"], "9 samples of both ranks, and a step has 6"
    assert kinds(["13", "15", "17"]) == [], "one step: the last one may be filled up"


@pytest.mark.parametrize(("kept", "repeated", "kinds"), [(1, 0, ["samples"]), (1, 1, ["samples"]), (3, 0, [])])
def test_a_part_made_by_hand_that_is_divided_once_more_is_found(kept, repeated, kinds):
    """Accelerate repeats samples to fill the last batch."""
    (reference,), ranks = made_up(), made_up(2)
    for record in ranks:
        record.facts.loaders["loader"].is_part = True
        for step in record.steps:
            del step.micro_batches[0].samples[0].digests[kept:]
    digests_of(ranks[1], 3).digests += digests_of(ranks[0], 0).digests[:repeated]
    assert [finding.kind for finding in several.findings(Comparison(reference, ranks)) if finding.kind] == kinds


def test_a_part_made_by_hand_with_samples_of_its_own_is_not_called_divided_twice():
    (reference,), ranks = made_up(), made_up(2)
    for record in ranks:
        record.facts.loaders["loader"].is_part = True
        for number in range(4):
            digests_of(record, number).digests = [f"{record.rank} {number}"] * (record.rank == 0 == number)
    comparison = Comparison(reference, ranks)
    assert list(several.findings(comparison)) == []
    assert "own part" in comparison.not_compared["samples"]


@pytest.mark.parametrize(("batch", "kinds"), [(None, []), (["a", "b", "c"], ["same_batches"])])
def test_batches_of_the_script_are_the_same_only_where_their_samples_are_known(batch, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders.clear()
        digests_of(record, 1).digests = batch
    assert [each.kind for each in several.findings(Comparison(reference, ranks)) if each.kind] == kinds


def test_parts_made_by_hand_count_twice_only_where_ranks_share_them():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        rank.facts.loaders["loader"].is_part = True
        for step in range(4):
            digests_of(rank, step).digests = [f"{rank.rank} {step} {number}" for number in range(3)]
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert "own part" in both.not_compared["samples"]
    assert "samples" not in both.compared
    for step in range(4):
        digests_of(ranks[1], step).digests = digests_of(ranks[0], 3 - step).digests
    (finding,) = found(reference, ranks)
    assert "12 of 24 samples of an epoch count twice" in finding.message


def test_an_epoch_that_ends_early_and_begins_alike_has_the_same_order():
    (record,) = made_up(steps=7)
    for number, step in enumerate(record.steps[4:]):
        part = step.micro_batches[0].samples[0]
        part.number, part.digests = 1, digests_of(record, number).digests
    assert [each.kind for each in single.findings(record)] == ["same_order"]


def test_samples_that_one_process_does_not_read_do_not_count_twice():
    """As where each process has a part of its own, of any size, and the reference a part of them."""
    (reference,), ranks = made_up(), made_up(2)
    for step in range(4):
        digests_of(ranks[1], step).digests += [f"more {step} {number}" for number in range(6)]
    both = Comparison(reference, ranks)
    assert [finding for finding in several.findings(both) if finding.kind] == []
    assert "one process does not" in both.not_compared["samples"]
    digests_of(ranks[1], 0).digests += digests_of(ranks[0], 0).digests
    assert [finding.kind for finding in several.findings(Comparison(reference, ranks))][:1] == ["samples"]


@pytest.mark.parametrize(("missing", "kinds"), [(5, []), (6, ["samples"])])
def test_as_many_samples_as_a_batch_are_missing(missing, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        rank.facts.loaders["loader"].drop_last = True
    for number in range(missing):
        digests_of(ranks[number % 2], number // 2).digests.pop()
    assert [each.kind for each in found(reference, ranks)] == kinds


def test_an_epoch_that_the_script_ends_early_may_have_fewer_samples():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        del rank.steps[2:]
    assert "12 of 24 samples" in found(reference, ranks)[0].message
    for rank in ranks:
        rank.passes[0].is_whole = False
    assert found(reference, ranks) == []


def test_an_epoch_that_is_read_to_its_end_may_train_on_a_part():
    """As where a script counts its steps by its own size of batches."""
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        del rank.steps[2:]
        rank.passes[0].read = [[*map(str, range(24))]]
    assert found(reference, ranks) == []


def test_other_samples_may_be_left_out_of_the_last_batch():
    """As by a RandomSampler on one process, and a DistributedSampler on two."""
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.loaders["loader"].drop_last, record.facts.loaders["loader"].items = True, 26
    digests_of(ranks[1], 2).digests = ["24", "25", "13"]
    assert found(reference, ranks) == []
    digests_of(ranks[1], 1).digests = ["other 1", "other 2", "other 3"]
    assert [finding.kind for finding in found(reference, ranks)] == ["items"]
