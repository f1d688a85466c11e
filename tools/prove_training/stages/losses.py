"""The coefficient of each loss in the gradient: the same for all samples, or tokens, of a step."""

from collections.abc import Iterator

from . import Comparison, Finding, close, first_line, note
from .single import weights


def of_one(both: Comparison, steps: tuple[dict, ...]) -> list[float]:
    """The coefficient of one loss, for each micro-batch of each process; [] where it is not known."""
    found = []
    for rank, step in zip(both.ranks, steps, strict=True):
        known = weights(rank, step)
        if known is None:
            return []
        for micro, (weight, count, _) in zip(step["micro_batches"], known, strict=True):
            is_stand_in = any(part["digests"] == [] for part in micro["samples"])
            found += [weight / count] if count and not is_stand_in else []
    return found


def are_unequal(both: Comparison, steps: tuple[dict, ...]) -> bool:
    found = of_one(both, steps)
    return bool(found) and not close(min(found), max(found))


def findings(both: Comparison, number: int, steps: tuple[dict, ...]) -> Iterator[Finding]:
    if not are_unequal(both, steps):
        return
    found, line = of_one(both, steps), first_line(steps[0])
    times = f"{max(found) / min(found):.3g} times"
    micro_batches = [micro for step in steps for micro in step["micro_batches"]]
    sizes = {sum(len(part["digests"] or []) for part in micro["samples"]) for micro in micro_batches}
    if len(sizes - {0}) == 1:
        what = f"a token of one micro-batch weighs {times} one of another: each has the mean over its own tokens"
        yield Finding("token_weights", "loss weights", what, number, line)
        return
    what = "in the last step of an epoch, a sample of the smaller micro-batch weighs "
    what += f"{times} one of the larger: a mean of means"
    if both.is_exact:
        yield Finding("mean_of_means", "loss weights", what, number, line)
    else:
        yield note("loss weights", what, None, line)
