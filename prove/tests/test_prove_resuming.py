"""Runs that resume, in records that are made up."""

from dataclasses import replace

import pytest
import torch

from prove_training import resuming
from prove_training.records import Part, Save
from prove_training.stages import single
from prove_training.tensors import sampled
from tests.made_up import digests_of, evaluation, made_up, scale


def test_a_checkpoint_that_nothing_loads_may_lack_the_optimizer():
    (reference,) = made_up()
    reference.facts.has_state = True
    reference.saves = [Save("torch.save", 2, "last.pt", "train.py:9", has={"model"}, counters=["epoch"])]
    (noted,) = single.findings(reference)
    assert noted.kind == ""
    assert noted.message == "last.pt has epoch, and not the optimizer and the schedule: the script cannot resume"
    reference.facts.loads = True
    assert [finding.kind for finding in single.findings(reference)] == ["checkpoint_lacks"]


def test_a_run_that_resumes_is_compared_with_one_that_was_not_interrupted():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    assert list(resuming.compare(whole, resumed, 2)) == []
    (replays,) = made_up()
    kinds = [finding.stage for finding in resuming.compare(whole, replays, 2)]
    assert kinds == ["resumed learning rate", "resumed samples"]
    resumed.steps[1].rates = [0.07]  # a schedule that began anew may have the same rate in its first step
    (finding,) = resuming.compare(whole, resumed, 2)
    assert (finding.stage, finding.step) == ("resumed learning rate", 4)


def test_a_state_that_the_run_that_resumes_does_not_have_is_not_restored():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    whole.steps[2] = replace(whole.steps[2], state_before={"weight/exp_avg": sampled(torch.ones(3))})
    (finding,) = resuming.compare(whole, resumed, 2)
    assert (finding.stage, finding.message[:13]) == ("resumed optimizer", "weight/exp_av")


def test_the_first_gradient_of_a_run_that_resumes_is_compared_unless_random_numbers_are_drawn():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = resumed.steps[2:]
    scale(resumed.steps[0].gradients, 1.01)
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.stage == "resumed gradient"
    assert list(resuming.compare(whole, resumed, 2, has_gradients=False)) == []
    resumed.steps[0].micro_batches[0].draws = True
    assert list(resuming.compare(whole, resumed, 2)) == []


def test_the_epoch_of_a_run_that_resumes_is_compared():
    (whole,), (resumed,) = made_up(), made_up()
    resumed.steps = [replace(step) for step in resumed.steps[2:]]
    for number, record in enumerate((whole, resumed), 1):
        record.passes[0].epoch = number
    for step in whole.steps[2:]:
        step.micro_batches[0].samples[0].number = 1
    whole.passes.append(replace(whole.passes[0], number=1, epoch=1))
    assert list(resuming.compare(whole, resumed, 2)) == [], "the same samples"
    digests_of(resumed, 0).digests = [f"other {number}" for number in range(6)]
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.message == "the epoch has the order of epoch 2, and not of 1"
    digests_of(resumed, 0).digests = [str(number) for number in range(6)]
    (finding,) = resuming.compare(whole, resumed, 2)
    assert finding.message == "the epoch after the checkpoint has the order of the first one"
    digests_of(resumed, 0).digests = [f"other {number}" for number in range(6)]
    resumed.passes[0].epoch = None
    assert [each.kind for each in resuming.compare(whole, resumed, 2)] == [""]


@pytest.mark.parametrize("kind", ["before", "state_before"])
def test_what_only_rank_0_has_loaded_is_told(kind):
    ranks = made_up(3)
    for rank in ranks:
        rank.steps[0].state_before = {"weight": sampled(torch.ones(3))}
    assert list(resuming.differing_ranks(ranks, False)) == []
    scale(getattr(ranks[2].steps[0], kind), 2.0)
    (finding,) = resuming.differing_ranks(ranks, False)
    assert (finding.kind, "ranks 0 and 2 begin with" in finding.message) == ("resume_alone", True)
    assert len(list(resuming.differing_ranks(ranks, True))) == (kind == "before"), "its state may be divided"
    ranks = made_up(2)
    for rank in ranks:
        rank.evaluations.append(evaluation())
    ranks[1].evaluations[0].models = {1: 0.7}
    (finding,) = resuming.differing_ranks(ranks, False)
    assert "the tested model has other weights on rank 1" in finding.message


def test_a_run_without_a_loader_that_resumes_is_compared():
    whole, resumed = made_up()[0], made_up()[0]
    for record in (whole, resumed):
        for step in record.steps:
            step.micro_batches[0].samples = [Part(None, None, ["a"])]
    resumed.steps = resumed.steps[2:]
    assert [each.kind for each in resuming.compare(whole, resumed, 2)] == []
