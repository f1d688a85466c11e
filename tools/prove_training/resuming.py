"""What a run that resumes does otherwise than one that was not interrupted: pure functions of records."""

from collections.abc import Iterator

from .stages import Finding, named, note, parts_of, passes_of, samples_of
from .tensors import differ
from .text import plural

SAME = 1e-6


def compare(whole: dict, resumed: dict, done: int) -> Iterator[Finding]:
    """Findings, in the order in which things happen.

    Args:
        whole: the record of a run that was not interrupted.
        resumed: of a run that went on from a checkpoint after `done` steps.
    """
    if not resumed["steps"]:
        yield Finding("resume", "resume", f"no step is made after the checkpoint of step {done}")
        return
    if len(whole["steps"]) <= done:
        yield note("resume", f"not compared: the checkpoint is of the last step, {done}")
        return
    first, expected = resumed["steps"][0], whole["steps"][done]
    step, line = done + 1, first["line"]
    apart = {
        name: difference
        for name, value in expected["before"].items()
        if (difference := differ(value, first["before"].get(name, value))) > SAME
    }
    if apart:
        what = f"{named(list(apart))}: the weights after step {done} are not those of the checkpoint"
        yield Finding("resume", "resumed weights", what, step, line)
    state = expected["state_before"]
    lost = [name for name, value in state.items() if not _is_same(value, first["state_before"].get(name))]
    if lost and not apart:
        what = f"{named(lost)}: the state of the optimizer is not restored"
        yield Finding("resume", "resumed optimizer", what, step, line)
    rates = list(_rates(whole, resumed, done))
    yield from rates
    samples = list(_samples(whole, resumed, done, line))
    yield from samples
    is_same = not (apart or lost or rates or samples)
    draws = any(micro["draws"] for each in (first, expected) for micro in each["micro_batches"])
    if is_same and not draws:
        names = [
            name for name, value in expected["gradients"].items() if not _is_same(value, first["gradients"].get(name))
        ]
        if names:
            what = f"{named(names)}: another gradient from the same weights and samples: something else is not restored"
            yield Finding("resume", "resumed gradient", what, step, line)


def _rates(whole: dict, resumed: dict, done: int) -> Iterator[Finding]:
    """A schedule that is not saved may go wrong in the second step only: the optimizer's state has the first rate."""
    for number, (step, expected) in enumerate(zip(resumed["steps"], whole["steps"][done:], strict=False), done + 1):
        for rate, wanted in zip(step["rates"], expected["rates"], strict=False):
            if abs(rate - wanted) > SAME * abs(wanted):
                what = f"{rate:.4g} instead of {wanted:.4g}"
                if rate in [rate for first in whole["steps"][:2] for rate in first["rates"]]:
                    what += ": the schedule begins anew"
                yield Finding("resume", "resumed learning rate", what, number, step["line"])
                return


def _is_same(value, other) -> bool:
    return other is not None and differ(value, other) <= SAME


def _samples(whole: dict, resumed: dict, done: int, line: str) -> Iterator[Finding]:
    first, expected = samples_of(resumed["steps"][0]), samples_of(whole["steps"][done])
    if not expected or first == expected:
        return
    passes = passes_of(whole)
    key = _pass_of(whole["steps"][done])
    before = [samples_of(step) for step in whole["steps"][:done] if _pass_of(step) == key]
    seen = set().union(*before)
    again = sum((first & part).total() for part in before)
    rest = [sample for sample in passes.get(key, []) if sample not in seen]
    if seen and again:
        what = f"{again} of {first.total()} samples were trained on before the checkpoint, in the same epoch"
        yield Finding("resume", "resumed samples", what, done + 1, line)
    elif seen:
        skipped = len(rest) - len(set(rest) & set(passes_of(resumed).get((key[0], 0), [])))
        what = "other samples than without the interruption"
        if skipped > 0:
            what = f"{plural(skipped, 'sample')} of the epoch are skipped"
        yield Finding("resume", "resumed samples", what, done + 1, line)
    elif first == samples_of(whole["steps"][0]):
        what = "the epoch after the checkpoint has the order of the first one"
        yield Finding("resume", "resumed samples", what, done + 1, line)
    else:
        yield note("resume", "the next epoch has another order than without the interruption", done + 1, line)


def _pass_of(step: dict) -> tuple[str, int] | None:
    first = next(parts_of(step), None)
    return first and (first["key"], first["pass"])
