"""Compares a resumed run with one that was not interrupted: pure functions of records."""

from dataclasses import replace
from typing import NamedTuple

from .records import Record, Step
from .stages import Finding, Findings, Note, named, parts_of, passes_of, ranks_differ, samples_of
from .stages.evaluations import differing_models
from .tensors import differ
from .text import plural

SAME = 1e-6


def merged(ranks: list[Record]) -> Record:
    """The first record, with the samples of all."""
    steps = []
    for of_ranks in zip(*(rank.steps for rank in ranks), strict=False):
        steps.append(replace(of_ranks[0], micro_batches=[micro for step in of_ranks for micro in step.micro_batches]))
    return replace(ranks[0], steps=steps)


class Resumed(NamedTuple):
    """A run that was not interrupted, and one that continued from a checkpoint after `done` steps."""

    whole: Record
    record: Record
    done: int

    @property
    def steps(self) -> tuple[Step, Step]:
        """The first step after the checkpoint, without the interruption and with it."""
        return self.whole.steps[self.done], self.record.steps[0]

    def differing(self, kind: str) -> str:
        """What differs in that step, as "weight and 2 others"; "" if nothing does."""
        known, loaded = (getattr(step, kind) for step in self.steps)
        names = [name for name, value in known.items() if name not in loaded or differ(value, loaded[name]) > SAME]
        return named(names) if names else ""

    def wrong(self, stage: str, message: str, after: int = 0) -> Finding:
        step = self.record.steps[after]
        return Finding("resume", f"resumed {stage}", message, self.done + after + 1, step.line)


def compare(whole: Record, resumed: Record, done: int, has_gradients: bool = True) -> Findings:
    """Findings, in the order in which things happen.

    Args:
        whole: the record of a run that was not interrupted.
        resumed: the record of a run that continued from a checkpoint after `done` steps.
        has_gradients: False if they depend on the number of processes, as with BatchNorm.
    """
    if not resumed.steps:
        yield Finding("resume", "resume", f"no step is made after the checkpoint of step {done}")
        return
    if len(whole.steps) <= done:
        yield Note("resume", f"not compared: the checkpoint is of the last step, {done}")
        return
    both = Resumed(whole, resumed, done)
    found = [finding for finding in (_state(both), _rate(both), _samples(both)) if finding]
    yield from found
    draws = any(step.drawn or any(micro.draws for micro in step.micro_batches) for step in both.steps)
    if not found and has_gradients and not draws and (names := both.differing("gradients")):
        message = f"{names}: a different gradient from the same weights and samples: something else is not restored"
        yield both.wrong("gradient", message)


def _state(both: Resumed) -> Finding | None:
    if names := both.differing("before"):
        message = f"{names}: the weights after step {both.done} are not those of the checkpoint"
        message += ", which has them in 16 bits" * any(save.is_rounded for save in both.whole.saves)
        return both.wrong("weights", message)
    if names := both.differing("state_before"):
        return both.wrong("optimizer", f"{names}: the state of the optimizer is not restored")
    return None


def _rate(both: Resumed) -> Finding | None:
    """A schedule that is not saved may differ in the second step only: the optimizer state has the first rate."""
    for after, (step, other) in enumerate(zip(both.record.steps, both.whole.steps[both.done :], strict=False)):
        if message := differing_rate(step.rates, other.rates, both.whole):
            return both.wrong("learning rate", message, after)
    return None


def _samples(both: Resumed) -> Finding | Note | None:
    whole, record, (expected, first) = both.whole, both.record, both.steps
    if not samples_of(expected) or samples_of(first) == samples_of(expected):
        missing = 0 if record.facts.has_saved else later_samples(whole, record, both.done)
        message = f"{plural(missing, 'sample')} of the next epoch are skipped"
        return both.wrong("samples", message) if missing else None
    if message := differing_samples(whole, record, both.done):
        return both.wrong("samples", message)
    right, epoch = (epoch_of(*each) for each in ((whole, pass_of(expected)), (record, pass_of(first))))
    if None not in (right, epoch) and right != epoch:
        return both.wrong("samples", f"the epoch has the order of epoch {epoch}, and not of {right}")
    message = "the next epoch has a different order than without the interruption"
    return Note("resume", message, both.done + 1, first.line)


def differing_ranks(ranks: list[Record], is_divided: bool) -> Findings:
    """What differs between processes that have resumed together.

    Args:
        is_divided: whether the state of the optimizer differs between them by design.
    """
    firsts = [rank.steps[0] for rank in ranks if rank.steps]
    kinds = {"before": "weights", "state_before": "a different state of the optimizer"}
    for kind, whose in kinds.items() if len(firsts) == len(ranks) else ():
        if not (is_divided and kind == "state_before") and (differing := ranks_differ(firsts, kind)):
            message = f"{differing} begin with {'different ' * (kind == 'before')}{whose}"
            yield Finding("resume_alone", "resumed weights", message, 1, firsts[0].line)
            return
    for tests in zip(*(rank.evaluations for rank in ranks), strict=False):
        for rank, test in enumerate(tests):
            if differing_models(tests[0], test):
                message = f"the tested model has other weights on rank {rank} than on rank 0"
                yield Finding("resume_alone", "resumed weights", message, None, test.line)
                return


def epoch_of(record: Record, place: tuple[str, int] | None) -> int | None:
    """What set_epoch got for a pass over the training data."""
    return next((each.epoch for each in record.passes if (each.key, each.number) == place), None)


def differing_rate(rates: list[float], expected: list[float], whole: Record) -> str:
    for rate, right in zip(rates, expected, strict=False):
        if abs(rate - right) > SAME * abs(right):
            begins = rate in [rate for first in whole.steps[:2] for rate in first.rates]
            return f"{rate:.4g} instead of {right:.4g}" + ": the schedule begins anew" * begins
    return ""


def differing_samples(whole: Record, resumed: Record, done: int) -> str:
    """What is wrong with the samples of the first step; "" if only a new epoch is shuffled differently."""
    first, current = samples_of(resumed.steps[0]), pass_of(whole.steps[done])
    before = [samples_of(step) for step in whole.steps[:done] if pass_of(step) == current]
    seen = set().union(*before)
    if not seen:
        begins = first == samples_of(whole.steps[0])
        return "the epoch after the checkpoint has the order of the first one" * begins
    if again := sum((first & part).total() for part in before):
        return f"{again} of {first.total()} samples were trained on before the checkpoint, in the same epoch"
    rest = {sample for sample in passes_of(whole).get(current, []) if sample not in seen}
    skipped = len(rest - set(passes_of(resumed).get((current[0], 0), [])))
    message = f"{plural(skipped, 'sample')} of the epoch are skipped"
    return message if skipped else "different samples than without the interruption"


def later_samples(whole: Record, resumed: Record, done: int) -> int:
    """How many samples the epoch after the first one of the resumed run has too few."""
    key, number = pass_of(whole.steps[done]) or (None, None)
    if key is None:
        return 0
    expected, found = passes_of(whole).get((key, number + 1), []), passes_of(resumed).get((key, 1), [])
    return max(0, len(expected) - len(found)) if found else 0


def pass_of(step: Step) -> tuple[str, int] | None:
    first = next(parts_of(step), None)
    return first and (first.key, first.number)
