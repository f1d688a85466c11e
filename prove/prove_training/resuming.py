"""Compares a resumed run with one that was not interrupted: pure functions of records."""

from dataclasses import replace

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
    first, expected = resumed.steps[0], whole.steps[done]

    def wrong(stage: str, message: str, step: int = done + 1, line: str = first.line) -> Finding:
        return Finding("resume", f"resumed {stage}", message, step, line)

    def differing(kind: str) -> list[str]:
        known, loaded = getattr(expected, kind), getattr(first, kind)
        return [name for name, value in known.items() if name not in loaded or differ(value, loaded[name]) > SAME]

    found = []
    if names := differing("before"):
        message = f"{named(names)}: the weights after step {done} are not those of the checkpoint"
        message += ", which has them in 16 bits" * any(save.is_rounded for save in whole.saves)
        found.append(wrong("weights", message))
    elif names := differing("state_before"):
        found.append(wrong("optimizer", f"{named(names)}: the state of the optimizer is not restored"))
    # A schedule that is not saved may differ in the second step only: the optimizer state has the first rate.
    for number, (step, other) in enumerate(zip(resumed.steps, whole.steps[done:], strict=False), done + 1):
        if message := differing_rate(step.rates, other.rates, whole):
            found.append(wrong("learning rate", message, number, step.line))
            break
    if samples_of(expected) and samples_of(first) != samples_of(expected):
        epochs = [epoch_of(record, pass_of(step) or ("", 0)) for record, step in ((whole, expected), (resumed, first))]
        if message := differing_samples(whole, resumed, done):
            found.append(wrong("samples", message))
        elif None not in epochs and epochs[0] != epochs[1]:
            found.append(wrong("samples", f"the epoch has the order of epoch {epochs[1]}, and not of {epochs[0]}"))
        else:
            message = "the next epoch has a different order than without the interruption"
            found.append(Note("resume", message, done + 1, first.line))
    elif not resumed.facts.has_saved and (missing := later_samples(whole, resumed, done)):
        found.append(wrong("samples", f"{plural(missing, 'sample')} of the next epoch are skipped"))
    draws = any(step.drawn or any(micro.draws for micro in step.micro_batches) for step in (first, expected))
    if not found and has_gradients and not draws and (names := differing("gradients")):
        message = f"{named(names)}: a different gradient from the same weights and samples: "
        found.append(wrong("gradient", f"{message}something else is not restored"))
    yield from found


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


def epoch_of(record: Record, place: tuple[str, int]) -> int | None:
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
