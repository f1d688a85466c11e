"""Evaluations, in records that are made up."""

import pytest

from prove_training.records import Evaluation, Loader
from prove_training.stages import Comparison, single
from prove_training.stages.evaluations import differing, explained, share, suspects
from tests.made_up import evaluation, made_up


def kinds_of_a_result(calls: list[str], samples=("ab", "ab")) -> list[str]:
    """What explains that two processes, with these collective calls and samples of each, print another accuracy."""
    (reference,), ranks = made_up(), made_up(2)
    reference.evaluations.append(evaluation(said=["accuracy 0.70"]))
    for rank, own in zip(ranks, samples, strict=True):
        test = evaluation(said=["accuracy 0.75"], collectives=[(call, "train.py:22") for call in calls])
        test.samples["test"] = [*own]
        rank.evaluations.append(test)
    both = Comparison(reference, ranks)
    return [explained(both, suspect).kind for suspect in suspects(both)]


@pytest.mark.parametrize(("cuts", "kind"), [(0, "eval_repeated"), (2, "eval_repeated"), (3, "eval_mean")])
def test_samples_count_twice_unless_gather_for_metrics_is_called_in_each_batch(cuts, kind):
    assert kinds_of_a_result(["gather", *["gather_for_metrics"] * cuts], ("ab", "ba")) == [kind]


def test_samples_that_the_processes_share_out_are_not_repeated():
    assert kinds_of_a_result(["gather"], ("a", "b")) == ["eval_mean"]


def test_evaluations_after_as_many_steps_are_compared():
    (reference,), ranks = made_up(), made_up(2)
    for record in (reference, *ranks):
        record.evaluations = [evaluation(after, said=[f"accuracy {after / 10}"]) for after in (2, 4)]
    assert suspects(Comparison(reference, ranks)) == []
    ranks[0].evaluations[1].said = ["accuracy 0.9"]
    assert [each.key for each in suspects(Comparison(reference, ranks))] == [(4, "accuracy")]


def test_results_in_files_of_a_folder_that_all_are_told_are_not_called_a_share():
    """collect_results of open-mmlab/mmengine, whose sampler repeats a sample."""
    assert kinds_of_a_result(["broadcast"], ("a", "ba")) == ["eval_repeated"]


@pytest.mark.parametrize(("others", "kind"), [([], "eval_extreme"), (["gather"], "eval_mean")])
def test_an_extreme_is_named_only_where_nothing_is_added_up(others, kind):
    assert kinds_of_a_result(["all_reduce(MAX)", *others]) == [kind]


@pytest.mark.parametrize(("own", "kinds"), [(9, []), (8, ["eval_share"])])
@pytest.mark.parametrize("calls", [[], [("all_reduce", "train.py:22")]])
def test_a_test_of_a_part_of_the_samples_is_told_unless_the_parts_are_added_up(own, kinds, calls):
    (reference,), ranks = made_up(), made_up(2)
    for record, samples in ((reference, 10), (ranks[0], own), (ranks[1], 10 - own)):
        test = evaluation(collectives=calls * (record.rank == 1))
        test.samples = {"loader": ["of training"] * 100, "test": [*map(str, range(samples))]}
        record.evaluations.append(test)
    assert [finding.kind for finding in share(Comparison(reference, ranks))] == kinds * (not calls)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["eval_share"]),
        ({"inputs": ["c", "a"]}, []),
        ({"said": ["loss 0.5"]}, []),
        ({"draws": True}, []),
        ({"collectives": [("all_reduce", "train.py:22")]}, []),
        ({"inputs": ["0", "a", "c"]}, []),  # a row of the training
    ],
)
def test_a_test_without_a_loader_is_of_all_processes_or_told_to_be_of_rank_0(changes, kinds):
    (reference,), ranks = made_up(), made_up(2)
    for record, rows in ((reference, "ab"), (ranks[0], "ac"), (ranks[1], "bd")):
        record.evaluations = [Evaluation(2, "train.py:20", inputs=[*rows], said=["loss 0.5"] * (record is ranks[0]))]
    vars(ranks[1].evaluations[0]).update(changes)
    assert [each.kind for each in share(Comparison(reference, ranks))] == kinds


@pytest.mark.parametrize(
    ("length", "said"), [(24, []), (25, ["drop_last leaves out the last samples of the test data"])]
)
def test_samples_that_a_test_leaves_out_are_told(length, said):
    (record,) = made_up()
    record.facts.loaders["test"] = Loader("train.py:6", given=6, length=length, drop_last=True)
    record.evaluations.append(evaluation())
    assert [each.message for each in single.findings(record)] == said


def test_the_process_is_named_that_tests_other_weights():
    (reference,), ranks = made_up(), made_up(3)
    for record in (reference, *ranks):
        record.evaluations.append(evaluation(said=[f"loss 0.{record.rank + len(ranks)}"]))
    reference.evaluations[0].said = ["loss 0.5"]
    ranks[2].evaluations[0].models = {1: 0.75}
    (suspect,) = suspects(Comparison(reference, ranks))
    finding = explained(Comparison(reference, ranks), suspect)
    assert (finding.kind, "on rank 2 than on rank 0" in finding.message) == ("eval_weights", True)


@pytest.mark.parametrize(("items", "kinds"), [(2, []), (1, ["eval_repeated"])])
def test_a_result_of_more_samples_than_the_data_have_is_told(items, kinds):
    (record,) = made_up()
    record.facts.loaders["test"] = Loader("train.py:6", items=items)
    record.evaluations.append(evaluation(result={"samples": 2.0}))
    assert [each.kind for each in single.findings(record)] == kinds


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ("accuracy: 74.00", "accuracy: 75.00", True),
        ("accuracy: 74.00", "accuracy: 74.01", False),
        ("loss 2.3286, 17/23", "loss 2.3286, 18/23", True),
        ("{'f1': 0.8135593220338984}", "{'f1': 0.8135593220338982}", False),
        ("accuracy: 74.00", "something else: 75.00", False),
        ("Acc@1:74 loss:0.52", "Acc@1:75 loss:0.52", True),
        ("1:53", "1:54", False),
        ("loss 0.5", "loss 0.52", False),
        ("time ( 0.25) accuracy 74.00", "time (250.31) accuracy 75.00", True),
        ("steps_per_second =  9.5", "steps_per_second = 11.5", True),
        (
            "2026-11-24 10:59:09,917 f1 0.5, eta 1 day, 0:00:01",
            "2026-11-24 11:00:10,004 f1 0.5, eta 1 day, 0:00:02",
            False,
        ),
    ],
)
def test_numbers_after_an_evaluation_may_differ_in_their_last_digit(one, other, differs):
    assert bool(list(differing([one], [other]))) == differs
