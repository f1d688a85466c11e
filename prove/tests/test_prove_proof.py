"""The verdict: runs that fail, wait or refuse, and further runs that show a cause. The runs are made up."""

import argparse
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prove_training import proof, runs
from prove_training.recording import same_work
from prove_training.records import Evaluation, Plan, Record, Save
from prove_training.runs import Outcome
from prove_training.stages import Comparison, Finding, unfinished
from prove_training.text import CannotTell
from tests.made_up import add, digests_of, drawn, evaluation, every_step, made_up, scale


def test_a_script_that_fails_with_fewer_samples_is_run_with_all():
    def outcome(processes: int, plan: Plan) -> Outcome:
        error = "Got 75 predictions and 100 features" if plan.limit < 100 else None
        return Outcome(made_up(), error, Path(), [], [], [])

    proven = proof.Proof(argparse.Namespace(processes=None), outcome, None)
    assert proven._first_run().error is None
    assert proven.plan.limit >= 100


def first_run(answer, **facts) -> proof.Proof:
    """A proof after its first run; `answer` says what a run with a plan leaves: the error, and whether it has steps."""

    def outcome(processes: int, plan: Plan) -> Outcome:
        error, has_steps = answer(plan)
        (record,) = made_up(steps=4 if has_steps else 0)
        vars(record.facts).update(facts, refuses=bool(error))
        record.facts.loaders["loader"].given = 9
        return Outcome([record], error, Path(), [], [], [])

    made = proof.Proof(argparse.Namespace(processes=None), outcome, None)
    made._first_run()
    return made


def test_a_model_for_one_batch_size_is_compared_with_numbers_of_processes_that_divide_it():
    made = first_run(lambda plan: (None if plan.own_batch_size else "shapes differ", True))
    assert (made.plan.limit, made.processes) == (same_work.items_of_epoch(9), (3,))


@pytest.mark.parametrize(("has_steps", "pretends"), [(False, True), (True, False)])
def test_a_gpu_is_pretended_to_a_script_that_asks_for_one_and_does_not_train_without(has_steps, pretends):
    made = first_run(lambda plan: ("no" if plan.without_gpu else None, has_steps), asks=True, ddp=[])
    assert (made.plan.without_gpu, made.pretends_gpu) == (pretends, pretends)


@pytest.mark.parametrize(
    ("error", "again", "makes"),
    [
        ("Default process group has not been initialized", None, True),
        ("ValueError: distributed training must be initialized first", "FileNotFoundError: data", True),
        ("torch.distributed is not initialized", "trying to initialize the default process group twice!", False),
        ("FileNotFoundError: data", None, False),
    ],
)
def test_a_group_is_made_for_a_script_that_asks_for_it_in_any_words(error, again, makes):
    made = first_run(lambda plan: (again if plan.makes_group else error, True), ddp=[])
    assert made.plan.makes_group == makes


@pytest.mark.parametrize("trains", [True, False])
def test_more_devices_are_pretended_only_to_a_script_that_trains_with_them(trains):
    made = first_run(lambda plan: (None, bool(plan.devices) and trains))
    assert made.plan.devices == proof.MANY * trains
    assert not made.pretends_gpu


@pytest.fixture
def made_up_proof():
    """A proof whose runs return what is given."""

    def made_up_proof(outcomes: list[Outcome]) -> proof.Proof:
        args = argparse.Namespace(script=Path("train.py"), format="json", processes=[2, 3])
        made = proof.Proof(args, lambda *_, **__: outcomes.pop(0), proof.Report(args))
        (made.reference,) = made_up()
        made._begin(made.reference.facts)
        return made

    return made_up_proof


def test_a_script_may_refuse_all_but_the_first_number_of_processes(made_up_proof):
    refused = made_up(2)
    refused[0].facts.refuses = True
    for processes in (2, 3):
        made = made_up_proof([Outcome(refused, "it ends with at most 1", Path(), [], [], [])] * 2)
        if processes == 3:
            assert made._compare(processes)
            assert made.report.lines[-1] == "  3 processes   not compared, it refuses them: it ends with at most 1"
        else:
            with pytest.raises(CannotTell, match="refuses 2 processes"):
                made._compare(processes)


@pytest.mark.parametrize(
    ("share", "later", "draws", "is_accused"),
    [
        (["a", "b"], [["c"]], False, True),
        (["c", "d"], [["a"]], False, True),
        (["c", "d"], [["c"]], False, False),
        (["c", "d"], [], False, True),
        (["c", "d"], [], True, False),
    ],
)
def test_items_with_numbers_that_differ_by_process_are_not_accused(made_up_proof, share, later, draws, is_accused):
    """Each rank has read the same samples: one that is augmented by the same numbers as the other is the same item.

    An item that comes again in the next pass, or is the same if it is read twice, is not augmented.
    """
    first, again = made_up(2), made_up(2)
    for part in (step.micro_batches[0].samples[0] for record in first for step in record.steps):
        part.digests = [f"other {digest}" for digest in part.digests]
    first[0].passes = [replace(first[0].passes[0], read=[read]) for read in (["a", "b"], *later)]
    first[0].facts.draws_by_itself = draws
    for record, read in zip(again, (["a", "b"], share), strict=True):
        record.passes[0].read = [read]
    made = made_up_proof([Outcome(records, None, Path(), [], [], []) for records in (first, again)])
    made.plan.seeds_own = True  # without effect: they are not of a generator that the items hold
    if is_accused:
        assert not made._compare(2)
        assert [each.kind for each in made.report.findings] == ["items"]
    else:
        with pytest.raises(CannotTell, match="random numbers that prove cannot repeat"):
            made._compare(2)


def test_a_schedule_is_tried_with_as_large_batches_of_more_data(made_up_proof):
    made, plans = made_up_proof([]), []
    made.runs = lambda processes, plan: plans.append(plan) or Outcome(made_up(2), None, Path(), [], [], [])
    assert made._counts_its_batches(2)
    assert (plans[0].whole_batches, plans[0].limit) == (True, 2 * made.plan.limit)


@pytest.mark.parametrize(("again", "kinds"), [("accuracy 0.70", ["eval_mean"]), ("accuracy 0.72", [])])
def test_a_printed_number_is_a_result_only_if_it_repeats_and_depends_on_the_samples(made_up_proof, again, kinds):
    def records(said: str, processes: int = 1) -> list[Record]:
        ranks = made_up(processes)
        for rank in ranks:
            rank.evaluations.append(evaluation(said=[said]))
        return ranks

    outcomes = [Outcome(records(said), None, Path(), [], [], []) for said in (again, "accuracy 0.60")]
    made = made_up_proof(outcomes)
    (made.reference,) = records("accuracy 0.70")
    comparison = Comparison(made.reference, records("accuracy 0.75", 2))
    assert [each.kind for each in made._evaluations(comparison)] == kinds


def test_evaluations_without_a_loader_that_differ_are_not_called_the_same(made_up_proof):
    def outcome(said: str, processes: int = 1) -> Outcome:
        ranks = made_up(processes)
        for rank in ranks:
            rank.evaluations.append(Evaluation(2, "train.py:20", said=[said]))
        return Outcome(ranks, None, Path(), [], [], [])

    one = "accuracy 0.70"
    made = made_up_proof([outcome("accuracy 0.75", 2), outcome(one), outcome(one), outcome(one, 2)])
    (made.reference,) = outcome(one).records
    assert made._compare(2)
    assert ("evaluations" in made.compared, "evaluations" in made.not_compared) == (False, True)
    assert made._compare(2)
    assert "evaluations" in made.compared


def test_items_with_generators_of_their_own_are_compared_when_these_are_seeded(made_up_proof):
    first, again, ranks = made_up(2), made_up(2), made_up(2)
    for step in (step for record in first for step in record.steps):
        step.micro_batches[0].samples[0].digests = [f"{step.line} {number}" for number in range(3)]
    first[0].facts.draws_by_itself = True
    for rank in again:
        rank.passes[0].read = [[f"of rank {rank.rank}"]]
    made = made_up_proof([Outcome(records, None, Path(), [], [], []) for records in (first, again, made_up(), ranks)])
    assert made._compare(2)
    assert made.plan.seeds_own
    assert "gradients" in made.compared


def test_a_run_that_resumes_and_differs_ends_the_proof(made_up_proof):
    (whole,), (same,), (other,) = made_up(), made_up(), made_up()
    same.steps, other.steps = same.steps[2:], other.steps[2:]
    other.steps[1].rates = [0.7]
    outcomes = [Outcome([record], None, Path(), [], [], []) for record in (same, other)]
    made = made_up_proof([])
    assert made._goes_on(outcomes[0], whole, 2)
    assert made.report.lines[-1] == "  resumed       the same after step 2"
    with pytest.raises(CannotTell, match="do its flags name a checkpoint"):
        made._goes_on(outcomes[1], whole, 2)
    other.facts.has_loaded = True
    assert not made._goes_on(outcomes[1], whole, 2)
    assert [each.stage for each in made.report.findings] == ["resumed learning rate"]


def interrupted(**of_ranks) -> list[Record]:
    ranks = made_up(2)
    for rank in ranks:
        rank.passes[0].is_whole = False
    ranks[1].error = "train.py:9: RuntimeError: gloo: Connection closed"
    ranks[1].doing = "in the backward pass at train.py:9"
    return ranks


def why(ranks: list[Record], calls=((), ())) -> tuple[str, str]:
    finding = unfinished.explain("the run", ranks, ranks[1].error, [], [list(each) for each in calls])
    return finding.kind, finding.message


def test_it_is_said_why_a_run_does_not_end():
    ranks = interrupted()
    assert why(ranks) == (
        "stops_alone",
        "rank 0 has ended after 4 steps, and rank 1 waits in the backward pass of train.py:9",
    )
    ranks[0].passes[0].is_whole = True
    assert why(ranks)[0] == "stops_alone", "an epoch has as many batches"
    ranks[0].passes[0].is_whole = False
    ranks[1].passes[0].batches = 5
    assert why(ranks)[0] == "stops_alone", "the epoch of rank 0 is not over"
    ranks[0].passes[0].is_whole = True
    assert why(ranks) == ("uneven", "an epoch has 4 batches on rank 0, and more on rank 1")
    ranks[1].passes[0].is_whole, ranks[0].passes[0].batches = True, 6
    assert why(ranks) == ("uneven", "an epoch has 5 batches on rank 1, and more on rank 0")
    ranks[1].unused, ranks[1].error = ["head"], "train.py:7: RuntimeError: Expected to have finished reduction"
    assert why(ranks)[0] == "unused"


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("3 gather train.py:4 2x2", "shapes", "calls gather with a tensor of 2, and rank 1 with one of 2x2"),
        ("3 reduce train.py:5 2x2", "hangs", "after 3 steps rank 0 calls gather, and rank 1 does not"),
    ],
)
def test_a_call_with_another_shape_is_told_from_another_call(call, kind, words):
    ranks = made_up(2)
    ranks[1].error = "train.py:9: RuntimeError: gloo: Connection closed"
    found = why(ranks, [["3 gather train.py:4 2"], [call]])
    assert (found[0], words in found[1]) == (kind, True), found


@pytest.mark.parametrize("cause", [0, 1])
def test_the_cause_of_an_error_is_told_and_not_its_consequences(tmp_path, cause):
    def left(rank: int, error: str | None) -> None:
        torch.save(Record(rank, error=error, waits="in gather"), tmp_path / f"record_{rank}.pt")
        (tmp_path / f"log_{rank}.txt").write_text(f"of rank {rank}")

    def outcome(is_over: bool) -> Outcome:
        return runs.Runs._outcome(argparse.Namespace(timeout_s=60), tmp_path, 2, tmp_path, is_over)

    left(cause, "train.py:7: ValueError: no")
    left(1 - cause, "train.py:9: RuntimeError: Connection closed")
    assert (outcome(False).error, outcome(False).log) == ("train.py:7: ValueError: no", [f"of rank {cause}"])
    assert outcome(False).waits == []
    torch.save(Record(1 - cause), tmp_path / f"record_{1 - cause}.pt")
    (tmp_path / f"record_{cause}.pt").unlink()
    assert (outcome(False).error, outcome(False).log) == ("a process ended without a record", [f"of rank {cause}"])
    assert outcome(True).error == "it did not end in 60 s"
    (tmp_path / "died").write_text("6")  # SIGABRT, by which a library ends a process that has failed
    assert outcome(False).error == "a process ended without a record"
    (tmp_path / "died").write_text("11")
    with pytest.raises(CannotTell, match="on 2 processes one dies of SIGSEGV, in a library"):
        outcome(False)


def test_a_port_is_not_one_that_the_system_may_give_to_others_meanwhile():
    """As a port of another test, by which mmengine's example was said to fail."""
    port = int(runs.Runs._address(None)["MASTER_PORT"])
    with socket.create_server(("127.0.0.1", port)):
        other = int(runs.Runs._address(None)["MASTER_PORT"])
    assert port < other < 32768


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: No CUDA GPUs are available",
        "train.py:3: AssertionError: Torch not compiled with CUDA enabled",
        "train.py:3: ImportError: libcudart.so.13: cannot open shared object file",
        "train.py:3: ModuleNotFoundError: No module named 'triton'",
        "train.py:3: RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
    ],
)
def test_an_error_about_gpus_is_known_by_its_words_and_not_by_its_place(error):
    assert proof.is_about_gpus(error)
    assert not proof.is_about_gpus("multi-gpu/train_gpu.py:3: ModuleNotFoundError: No module named 'multi_gpu'")
    assert not proof.is_about_gpus(None)


def verdict(ranks: list[Record], waits=(), is_strict: bool = True, draws=()) -> tuple[int, str]:
    """The verdict on runs with these records, after one with a correct record of one process, which draws this."""
    (reference,) = made_up()
    every_step([reference], drawn=draws)
    args = argparse.Namespace(
        script=Path("train.py"), format="json", processes=(2,), resume_flags=None, timeout_s=60, strict=is_strict
    )
    outcomes = [
        Outcome([reference], None, Path(), [], [], [[]]),
        Outcome(ranks, None, Path(), list(waits), [], [[], []]),
    ]

    def run(*_) -> Outcome:
        return outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]

    return proof.Proof(args, run, proof.Report(args)).verdict()


def test_a_wrong_evaluation_does_not_condemn_the_training():
    proven = proof.Proof(argparse.Namespace(processes=None), None, None)
    proven.compared = {"samples", "gradients"}
    finding = Finding("eval_repeated", "evaluation", "1 sample counted twice")
    words = "wrong: 1 sample counted twice (evaluation); in training, the same samples and gradients"
    assert proven.wrong([finding]) == (1, words)
    assert proven.wrong([finding, Finding("samples", "samples", "no")])[1] == words.partition(";")[0]


def draw_by_place(ranks: list[Record]) -> None:
    """Random numbers, and with them gradients, that are others than on one process."""
    for step in (step for rank in ranks for step in rank.steps):
        step.micro_batches[0].draws = True
        add(step.gradients, [1.0, 0.0, 0.0])
        step.at_step = step.gradients


def test_what_was_not_compared_is_not_proven():
    same = "the same samples, gradients, learning rates and weights on 1 and 2 processes"
    assert verdict(made_up(2)) == (0, f"proven: {same}")
    ranks = made_up(2)
    for rank in ranks:
        for step in rank.steps:
            step.micro_batches[0].draws = True
    assert verdict(ranks)[1] == f"proven: {same}", "random numbers that change nothing"
    draw_by_place(ranks)
    code, words = verdict(ranks)
    assert (code, words[:50]) == (3, "nothing wrong found; not compared: gradients; the ")


def test_noise_that_each_step_repeats_is_not_proven():
    code, words = verdict(made_up(2), draws=drawn("a"))
    assert (code, words[:56]) == (3, "nothing wrong found; not compared: random numbers; the s")


def test_what_was_not_compared_ends_with_3_only_if_asked():
    ranks = made_up(2)
    draw_by_place(ranks)
    for is_strict in (True, False):
        assert verdict(ranks, is_strict=is_strict)[0] == 3 * is_strict


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda ranks: scale(ranks[1].steps[0].gradients, 2.0), "not_reduced"),
        (lambda ranks: ranks[1].saves.extend(ranks[0].saves), ""),
        (lambda ranks: setattr(digests_of(ranks[1], 0), "digests", ["0", "2", "4"]), "local_rank"),
        (lambda ranks: vars(ranks[0].facts).update(asked=1, cannot_tell="it asks for 1 process"), "local_rank"),
    ],
)
def test_what_differs_only_on_several_machines_is_a_mistake_in_training(made_up_proof, change, kind):
    apart, on_one = made_up(3), made_up(3)
    for ranks in (apart, on_one):
        ranks[0].saves = [Save("torch.save", 2, "last.pt", "train.py:9")]
    change(apart)
    made = made_up_proof([Outcome(ranks, None, Path(), [], [], []) for ranks in (apart, on_one)])
    assert made._compare(3) == (not kind)
    findings = made.report.findings or made.report.notes
    assert findings[0].kind == kind
    assert "if each process has a machine of its own" in findings[0].message


def test_a_run_that_waits_is_wrong_only_if_steps_are_missing():
    assert verdict(made_up(2), ["rank 0 waits in gather at train.py:4"])[0] == 0
    code, words = verdict(made_up(2, steps=3), ["rank 0 waits in gather at train.py:4"])
    assert (code, "waits forever: rank 0 waits in gather at train.py:4" in words) == (1, True)


def test_another_error_is_not_explained_by_what_others_wait_for():
    ranks = interrupted()
    ranks[1].error = "train.py:9: ValueError: no"
    assert why(ranks, [["3 gather train.py:4 2"], []]) == ("fails", "train.py:9: ValueError: no")
