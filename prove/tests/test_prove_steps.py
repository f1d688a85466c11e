"""Gradients, learning rates and weights of each step, in records that are made up."""

from dataclasses import replace

import pytest
import torch

from prove_training.records import Draw, MicroBatch, Save
from prove_training.stages import Comparison, Finding, several, single, steps
from prove_training.tensors import sampled
from tests.made_up import accumulated, add, drawn, evaluation, every_step, found, made_up, save_state, scale


def test_made_up_records_without_a_change_are_the_same():
    (reference,), ranks = made_up(), made_up(2)
    assert found(reference, ranks) == []
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert both.compared >= {"samples", "gradients", "learning rates", "weights"}


@pytest.mark.parametrize(
    ("counts", "kinds"), [([1, 2, 2, 2], ["first_step"]), ([2, 2, 2, 1], ["last_step"]), ([2, 1, 2, 2], ["last_step"])]
)
def test_a_step_after_the_first_micro_batch_is_not_taken_for_a_shorter_last_one(counts, kinds):
    assert [finding.kind for finding in single.findings(accumulated(counts))] == kinds


def test_micro_batches_that_are_left_because_data_are_cut_are_not_a_mistake():
    shorter, longer = accumulated([2, 2, 2, 1]), accumulated([2, 2, 3, 2])
    for micro, number in zip(longer.steps[2].micro_batches, (0, 1, 1), strict=True):
        micro.samples[0].number = number
    for record, kind in ((shorter, "last_step"), (longer, "leftover")):
        assert kind in [finding.kind for finding in single.findings(record)]
        record.facts.loaders["loader"].length = 24
        assert kind not in [finding.kind for finding in single.findings(record)]


def test_what_a_framework_does_in_the_last_step_is_a_note():
    record = accumulated([2, 2, 2, 1])
    record.facts.framework = "Lightning"
    (finding,) = single.findings(record)
    assert (finding.kind, finding.message[-13:]) == ("", " by Lightning")


def test_gradients_may_be_set_to_zero_between_two_backward_passes_of_one_batch():
    """As for an adversarial example, whose gradient is no gradient of the step."""
    record = accumulated([2, 2, 2], weight=0.5)
    record.steps[1].zeroed = [(1, "train.py:9")]
    assert [finding.kind for finding in single.findings(record)] == ["zeroed"]
    record.steps[1].micro_batches[1].samples = []
    assert list(single.findings(record)) == []


def test_rewards_that_are_all_the_same_are_no_mistake():
    (record,) = made_up()
    for step in record.steps:
        step.at_step["weight"] = sampled(torch.zeros(3))
    assert single.cannot_judge(record) is None  # the loss is known, and has no gradient
    for step in record.steps:
        step.micro_batches[0].losses = []
    assert single.cannot_judge(record).startswith("every gradient is zero")


def test_gradients_that_the_optimizer_averages_may_differ_before():
    (reference,), ranks = made_up(), made_up(2)
    every_step(ranks, in_step=True)
    for rank, factor in zip(ranks, (0.5, 1.5), strict=True):
        for step in rank.steps:
            scale(step.gradients, factor)
    comparison = Comparison(reference, ranks)
    assert list(several.findings(comparison)) == []
    assert "gradients" in comparison.compared


def test_gradients_of_large_tensors_are_compared_if_the_optimizer_only_communicates():
    """As microsoft/dion, which draws a matrix in its step and broadcasts it. The norm is of more than is recorded."""
    (reference,), ranks = made_up(), made_up(2)
    every_step(ranks, in_step=True)
    for record in (reference, *ranks):
        for step in record.steps:
            step.gradients = {"weight": torch.tensor([100.0, 1.0, 2.0])}
            step.drawn = [Draw("dion.py:8", "randn", "a", 8, is_per_sample=False)]
    comparison = Comparison(reference, ranks)
    assert list(several.findings(comparison)) == []
    assert "gradients" in comparison.compared


def test_only_draws_by_sample_let_a_gradient_show_its_cause():
    (record,) = made_up()
    step, draw = record.steps[0], Draw("train.py:8", "rand", "a", 1, is_per_sample=False)
    assert steps.is_by_sample((step,))
    step.drawn = [replace(draw, is_repeated=True)]
    assert steps.is_by_sample((step,))
    assert not steps.is_by_sample((step, replace(step, drawn=[draw])))  # a coin for the batch of each process
    step.micro_batches[-1].draws = True
    assert not steps.is_by_sample((step,))


def test_the_first_of_several_calls_that_clip_may_be_too_early():
    record = accumulated([2, 2])
    record.steps[0].clips = [(1, "train.py:8"), (2, "train.py:9")]
    (finding,) = single.findings(record)
    assert (finding.kind, finding.line) == ("clip_early", "train.py:8")


def test_what_comes_after_a_step_whose_weights_are_not_kept_is_not_compared():
    (reference,), ranks = made_up(), made_up(2)
    reference.weights = {}
    scale(ranks[0].steps[1].gradients, 2.0)
    both = Comparison(reference, ranks)
    assert list(several.findings(both)) == []
    assert "gradients" in both.compared
    assert "steps after 1" in both.not_compared


@pytest.mark.parametrize("is_exact", [True, False])
def test_running_statistics_of_one_process_are_a_mistake_only_where_exactness_is_promised(is_exact):
    (reference,), ranks = made_up(), made_up(2)
    reference.facts.is_exact = is_exact
    for rank, record in enumerate(ranks):
        record.steps[1].statistics = {"norm.running_mean": sampled(torch.ones(3) + rank)}
    (finding,) = several.findings(Comparison(reference, ranks))
    assert (finding.kind, finding.step) == ("statistics", 2) if is_exact else ("", None)
    assert "norm.running_mean: ranks 0 and 1" in finding.message


def test_what_happens_in_one_step_only_is_not_a_mistake():
    """No gradient, as where a loss is zero, and evaluation mode."""
    (reference,) = made_up()
    reference.steps[1].at_step = {}
    reference.evaluations.append(evaluation())
    reference.steps[2].modes = {0: False}
    assert list(single.findings(reference)) == []


OTHERS = {  # what no program of MISTAKES has: the kind and words of what is found in records of three processes
    "a gradient by 1 %": (
        ("factor", "1.01 times"),
        lambda one, ranks: [scale(rank.steps[2].gradients, 1.01) for rank in ranks],
    ),
    "a parameter": (
        ("unused", "weight has a gradient on 1 process only"),
        lambda one, ranks: [rank.steps[0].gradients.clear() for rank in ranks],
    ),
    "the same noise in a model": (
        ("", "randn draws the same"),
        lambda one, ranks: every_step(ranks, drawn=drawn("a", in_model=True)),
    ),
    "initial weights of the last rank": (
        ("initial_weights", "ranks 0 and 2 begin with different weights"),
        lambda one, ranks: scale(ranks[2].initial, 1.01),
    ),
    "clipped gradients of the last rank": (
        ("clipped", "ranks 0 and 2 have different gradients after clipping"),
        lambda one, ranks: scale(ranks[2].steps[1].at_step, 1.01),
    ),
    "clipped gradients of all ranks": (
        ("factor", "weight: 1.01 times what it is on 1 process, after clipping"),
        lambda one, ranks: [
            every_step([one, *ranks], clips=[(1, "train.py:9")]),
            *(scale(rank.steps[1].at_step, 1.01) for rank in ranks),
        ],
    ),
    "a factor of its own for each parameter": (
        ("gradient", "weight and 1 other: not a multiple of what it is on 1 process"),
        lambda one, ranks: [
            *(rank.steps[2].gradients.update(bias=2 * sampled(torch.ones(2))) for rank in ranks),
            one.steps[2].gradients.update(bias=sampled(torch.ones(2))),
            *(scale(rank.steps[2].gradients, 3.0) for rank in ranks),
        ],
    ),
    "weights before a step": (
        ("weights", "after the step before, rank 2 changes the weights by another amount"),
        lambda one, ranks: scale(ranks[2].steps[1].before, 1.01),
    ),
    "the state of the optimizer before a step": (
        ("weights", "after the step before, rank 1 changes the optimizer state by another amount"),
        lambda one, ranks: [
            *(rank.steps[2].state_before.update(weight=sampled(torch.ones(3))) for rank in (one, *ranks)),
            scale(ranks[1].steps[2].state_before, 1.01),
        ],
    ),
    "a group of processes that is not all": (
        ("not_reduced", "ranks 0 and 2 have different gradients at the step"),
        lambda one, ranks: scale(ranks[2].steps[0].gradients, 1.01),
    ),
    "a gradient that one process does not have": (
        ("not_reduced", "ranks 0 and 1 have different gradients at the step"),
        lambda one, ranks: ranks[1].steps[0].gradients.clear(),
    ),
    "the wrong micro-batch": (
        ("not_reduced", "averaged after micro-batch 1 of 2, and not after the last one"),
        lambda one, ranks: [
            scale(ranks[1].steps[0].gradients, 2.0),
            *(rank.steps[0].micro_batches.append(MicroBatch(syncs=False)) for rank in ranks),
        ],
    ),
    "a gradient that is divided after the backward pass": (
        ("factor", "0.5 times what it is on 1 process, and the loss is not"),
        lambda one, ranks: [scale(rank.steps[0].gradients, 0.5) for rank in ranks],
    ),
    "a sum by hand": (
        ("summed", "the processes' gradients are added up, and not divided by 3"),
        lambda one, ranks: [
            every_step([rank], own=dict(rank.steps[0].gradients), collectives=[("all_reduce", "train.py:9")])
            or [scale(step.gradients, 3.0) for step in rank.steps[:1]]
            for rank in ranks
        ],
    ),
    "weights that nothing is taken of": (
        ("loads_nothing", "all names differ, as that of module.weight"),
        lambda one, ranks: [
            vars(rank.facts).update(loads_nothing="train.py:4", lost="module.weight") for rank in ranks
        ],
    ),
    "DataParallel in each process": (
        ("data_parallel", "nn.DataParallel gives each process all GPUs"),
        lambda one, ranks: [setattr(rank.facts, "data_parallel", "train.py:4") for rank in ranks],
    ),
    "a buffer of each process": (
        ("gradient", "the buffer center differs, which each forward pass changes by its own samples"),
        lambda one, ranks: [
            *(setattr(rank.steps[0], "buffers", {"center": str(rank.rank // 2)}) for rank in (one, *ranks)),
            *(add(rank.steps[0].gradients, [0.0, 0.1, 0.0]) for rank in ranks),
        ],
    ),
    "workers that are seeded alike": (
        ("worker_seeds", "worker_init_fn gives the workers of each process the same numbers"),
        lambda one, ranks: [
            vars(rank.facts).update(draws_others=True, worker_seeds={"train.py:5": "a"}) for rank in ranks
        ],
    ),
    "weights after a step": (
        ("weights", "weight changes by another amount than on 1 process, from the same gradient"),
        lambda one, ranks: [
            rank.steps[1].weights.update(weight=sampled(torch.ones(3) - 0.105 * torch.tensor([2.0, 3.0, 4.0])))
            for rank in ranks
        ],
    ),
    "a loss that ReduceLROnPlateau gets": (
        ("plateau", "ReduceLROnPlateau gets 0.7 on rank 0 and 0.707 on rank 2"),
        lambda one, ranks: [
            rank.plateaus.append((loss, "train.py:9")) for rank, loss in zip(ranks, (0.7, 0.7, 0.707), strict=True)
        ],
    ),
    "the same augmentation": (
        ("", "the augmentation draws the same"),
        lambda one, ranks: [setattr(rank.facts, "draws_items", True) for rank in ranks],
    ),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_number_that_differs_in_one_place_is_found(change):
    (kind, words), apply = OTHERS[change]
    (reference,), ranks = made_up(), made_up(3)
    apply(reference, ranks)
    finding = found(reference, ranks)[0]
    assert (finding.kind, words in finding.message) == (kind, True), finding


@pytest.mark.parametrize("others", [0.5, 0.7])
def test_a_factor_of_gradients_with_noise_is_trusted_if_all_steps_have_it(others):
    (reference,), ranks = made_up(), made_up(2)
    every_step(ranks, drawn=drawn("a"))
    for rank in ranks:
        for number, step in enumerate(rank.steps):
            step.drawn = [Draw("train.py:8", "rand", f"{rank.rank} {number}", 1, is_per_sample=False)]
            scale(step.gradients, others if number else 0.5)
            step.at_step = step.gradients
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == ["factor"] * (others == 0.5)
    assert ("random numbers" in both.not_compared["gradients"]) == (others != 0.5)


@pytest.mark.parametrize(("change", "steps_with_one"), [([0.0, 0.1, 0.0], [1, 2, 3, 4]), ([0.0, 0.0, 0.0], [])])
def test_gradients_with_noise_by_sample_are_looked_into_if_they_differ_by_no_factor(change, steps_with_one):
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        for number, step in enumerate(rank.steps):
            step.drawn = drawn(f"{rank.rank} {number}", is_repeated=True)
            add(step.gradients, change)
            step.at_step = step.gradients
    both = Comparison(reference, ranks)
    list(several.findings(both))
    assert [each.step for each in both.suspects] == steps_with_one


def test_gradients_that_are_rounding_alone_are_no_finding():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps:
            values = [1e-8, 2e-8, 3e-8] if record is reference else [2e-8, 1e-8, 1e-8]
            step.gradients = step.at_step = {"weight": sampled(torch.tensor(values))}
    both = Comparison(reference, ranks)
    assert [each.kind for each in several.findings(both)] == []
    assert both.not_compared["gradients"].startswith("they are rounding alone")


def test_own_gradients_show_by_which_parts_of_a_sum_each_process_divides():
    (reference,), ranks = made_up(), made_up(2)
    own = [torch.tensor([float(rank), 1.0, *range(9)]) ** (rank + 1) for rank in range(2)]
    for rank, gradient in zip(ranks, own, strict=True):
        rank.steps[1].gradients = {"weight": sampled(gradient)}
    finding = Finding("gradient", "gradient", "not a multiple", 2, "train.py:9")
    parts = ((0.25, 0.75, "token_weights"), (1.0, 1.0, "gradient"), (0.5, 0.5, "gradient"))
    for one, other, kind in parts:
        right = one * own[0] + other * own[1]
        reference.steps[1].gradients = {"weight": sampled(right)}
        assert steps.with_cause(reference, ranks, finding).kind == kind
    plane = torch.linalg.qr(torch.stack(own, 1))[0]
    rest = right.sin() - plane @ (plane.T @ right.sin())
    reference.steps[1].gradients = {"weight": sampled(0.25 * own[0] + 0.75 * own[1] + 100 * rest)}
    assert steps.with_cause(reference, ranks, finding) == finding


def test_calls_that_agree_are_not_a_mistake():
    (reference,), ranks = made_up(), made_up(3)
    for rank in ranks:
        rank.plateaus += [(value, "train.py:9") for value in (0.7 + 1e-6 * rank.rank, float("nan"))]
        rank.saves += [save_state(), Save("torch.save", 2, "?", "train.py:9")]  # a file that is open already
        rank.facts.draws_items = True
        rank.passes[0].random = rank.rank
        rank.passes.append(replace(rank.passes[0], in_training=False, random="a"))
    assert found(reference, ranks) == []


@pytest.mark.parametrize(("others", "bias"), [(1.0, 1e-9), (1e-4, 2e-8), (1e3, 1e-3)])
def test_a_parameter_whose_gradient_is_rounding_is_not_compared(others, bias):
    """As the key bias of attention with Adam, or a bias that adds the same to all choices of a tiny model."""
    (reference,), ranks = made_up(), made_up(2)
    for record, sign in ((reference, 1), *((rank, -1) for rank in ranks)):
        for step in record.steps:
            scale(step.gradients, others)
            scale(step.at_step, others)
            values = {"gradients": sign * bias, "at_step": sign * bias, "before": 0.0, "weights": -sign * 0.1}
            for kind, value in values.items():
                getattr(step, kind)["bias"] = sampled(torch.full((3,), value))
    assert found(reference, ranks) == []


def test_unequal_weights_of_tokens_are_not_told_again_as_different_weights():
    (reference,), ranks = made_up(), made_up(2)
    for rank in ranks:
        step = rank.steps[2]
        for kind in ("gradients", "at_step"):
            scale(getattr(step, kind), 1.5)
        step.weights["weight"] = sampled(torch.ones(3) - 0.1 * step.at_step["weight"][1:])
    ranks[1].steps[2].micro_batches[0].losses = [(2.0, 3, "train.py:8")]
    assert [finding.kind for finding in found(reference, ranks)] == ["token_weights"]


def test_a_process_without_samples_does_not_hide_unequal_weights_of_tokens():
    (reference,), ranks = made_up(), made_up(3)
    for rank, (samples, weight) in zip(ranks, ((3, 1.0), (3, 2.0), (0, 0.5)), strict=True):
        micro = rank.steps[2].micro_batches[0]
        micro.losses, micro.samples[0].digests = (
            [(weight, 3, "train.py:8")],
            [f"{rank.rank} {n}" for n in range(samples)],
        )
    ranks[2].steps[2].micro_batches[0].samples = []
    (finding,) = steps.findings(Comparison(reference, ranks))
    assert finding.kind == "token_weights"


@pytest.mark.parametrize(("count", "kinds"), [(3, ["token_weights"]), (1, [])])
def test_a_single_loss_may_have_a_weight_of_its_own(count, kinds):
    """As an advantage, by which the loss of a sample is multiplied."""
    (reference,), ranks = made_up(), made_up(2)
    for rank, weight in zip(ranks, (1.0, -0.9), strict=True):
        rank.steps[2].micro_batches[0].losses = [(weight, count, "train.py:8")]
    assert [finding.kind for finding in found(reference, ranks)] == kinds


def test_a_single_loss_that_is_a_mean_like_the_others_is_one_in_a_mean_of_means():
    (reference,), ranks = made_up(), made_up(2)
    for record, samples in ((reference, 3), (ranks[0], 2), (ranks[1], 1)):
        micro = record.steps[3].micro_batches[0]
        del micro.samples[0].digests[samples:]
        micro.losses = [(1.0, samples, "train.py:8")]
    said = [each.message for each in several.findings(Comparison(reference, ranks))]
    assert any("a sample of the smaller micro-batch weighs 2 times" in message for message in said), said


def test_a_schedule_that_is_twice_as_fast_is_found_though_milestones_may_be_rounded():
    (reference,), ranks = made_up(steps=8), made_up(2, steps=8)
    for number, step in (entry for rank in ranks for entry in enumerate(rank.steps)):
        step.rates, step.schedule_calls = [0.1 * 0.8 ** (2 * number)], 2 * number
    finding = found(reference, ranks)[0]
    assert (finding.kind, finding.step, finding.message[-34:]) == ("schedule", 3, ": the schedule is 2 times too fast")


def test_a_schedule_is_called_too_fast_only_where_two_steps_show_it():
    known = [1.0, 0.9, 0.5, 0.2, 0.1]
    assert steps.are_faster([1.0, 0.5, 0.1], known, 2, 2)
    assert not steps.are_faster([1.0, 0.5], known, 2, 2)


@pytest.mark.parametrize(
    ("number", "where"), [(2, "in the last step of an epoch"), (1, "where the micro-batches of a")]
)
def test_a_mean_of_means_is_told_where_it_is(number, where):
    (reference,), ranks = made_up(), made_up(2)
    micro_batches = [record.steps[number].micro_batches[0] for record in (reference, *ranks)]
    whole, larger, smaller = (micro.samples[0].digests for micro in micro_batches)
    last = smaller.pop()
    if number == 2:
        whole.remove(last)
    else:
        larger.append(last)
    for micro in micro_batches:
        micro.losses = [(1.0, len(micro.samples[0].digests), "train.py:8")]
    said = [each.message for each in several.findings(Comparison(reference, ranks))]
    assert [message.startswith(where) for message in said if "a mean of means" in message] == [True]


def test_a_group_of_parameters_may_be_added_while_training():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        for step in record.steps[2:]:
            step.rates, step.bases = [*step.rates, 0.01], [0.1, 0.01]
    assert found(reference, ranks) == []
    ranks[1].steps[3].rates[1] = 0.02
    assert found(reference, ranks)[0].message == "group 1: a rate of 0.01 on rank 0 and of 0.02 on rank 1"


@pytest.mark.parametrize("bases", [(0.0, 0.0), (0.1, 0.2)])  # without a scheduler, and with one
def test_a_warm_up_to_a_rate_that_grows_with_the_processes_may_be_meant(bases):
    (reference,), ranks = made_up(steps=6), made_up(2, steps=6)
    for factor, record in ((1, reference), (2, ranks[0]), (2, ranks[1])):
        for number, step in enumerate(record.steps):
            step.rates, step.bases = [0.1 * factor * number], [bases[factor - 1]]
    (said,) = {each.message for each in found(reference, ranks)}
    assert said.startswith("2 times as high on 2 processes")


def test_a_rate_may_grow_with_the_processes_and_fall_to_a_constant():
    (reference,), ranks = made_up(steps=6), made_up(2, steps=6)
    for highest, record in ((1.0, reference), (2**0.5, ranks[0]), (2**0.5, ranks[1])):
        for number, step in enumerate(record.steps):
            step.rates, step.bases = [highest + (0.1 - highest) * number / 5], [0.0]
    (said,) = {each.message for each in found(reference, ranks)}
    assert said.startswith("1.41 times as high on 2 processes")


def test_the_bits_of_gradients_are_compared_under_virtual_processes():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.facts.virtual_processes = 6
    assert found(reference, ranks) == []
    for rank in ranks:
        scale(rank.steps[1].gradients, 1 + 1e-9)
    (finding,) = found(reference, ranks)
    assert finding.kind == "float_sums"
    assert "other bits than on 1 process, by up to 1.0e-09 of its value" in finding.message


def test_any_of_two_models_may_stay_in_evaluation_mode():
    (record,) = made_up()
    for number, step in enumerate(record.steps):
        step.modes = {0: True, 1: number < 2}
    assert [(each.kind, each.step) for each in single.findings(record)] == [("train_mode", 3)]


@pytest.mark.parametrize(("prefix", "notes"), [("_orig_mod.", 1), ("", 0)])
def test_names_of_a_compiled_model_are_a_note(prefix, notes):
    (reference,), ranks = made_up(), made_up(2)
    ranks[0].saves = [Save("torch.save", 2, "last.pt", "train.py:9", prefix=prefix)]
    assert [each.kind for each in found(reference, ranks)] == [""] * notes


def test_the_step_from_which_on_a_model_trains_in_evaluation_mode_is_named():
    (record,) = made_up()
    for step in record.steps[2:]:
        step.modes = {0: False}
    (finding,) = single.findings(record)
    assert (finding.kind, finding.step) == ("train_mode", 3)


def test_of_two_windows_as_frequent_the_larger_is_the_usual_one():
    assert single.usual_micro_batches(accumulated([1, 3, 3, 1])) == 3


def test_the_usual_window_is_that_of_steps_within_an_epoch():
    record = accumulated([4, 7, 7])
    for step in record.steps[1:]:
        for micro in step.micro_batches[:3]:
            micro.samples[0].number = -1
    record.facts.loaders["loader"].length = 6 * 938
    assert single.usual_micro_batches(record) == 4
    assert "leftover" in [finding.kind for finding in single.findings(record)]
