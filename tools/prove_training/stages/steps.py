"""Gradients and weights of each step, which starts from the same weights."""

import collections
import math
from collections.abc import Iterator

import torch

from ..tensors import differ, norm_of
from . import (
    APART,
    EPSILON,
    TOLERANCE,
    ZERO,
    Comparison,
    Finding,
    apart,
    close,
    largest_step,
    losses,
    named,
    note,
    rates,
    rounding,
    samples_of,
)
from .single import total_weight, usual_micro_batches


def parts(both: Comparison) -> int:
    """Micro-batches of a process per micro-batch of the reference."""
    return usual_micro_batches(both.ranks[0]) // usual_micro_batches(both.reference)


def rounding_of(reference: dict, again: dict) -> float:
    """The largest difference of a gradient in two runs on one process, relative to the largest gradient of the step."""
    found = [0.0]
    for one, other in zip(reference["steps"], again["steps"], strict=False):
        largest = max(map(norm_of, one["gradients"].values()), default=0.0) or 1.0
        both = [(value, other["gradients"].get(name, value)) for name, value in one["gradients"].items()]
        found += [differ(*pair) * norm_of(pair[0]) / largest for pair in both]
    return max(found)


def findings(both: Comparison) -> Iterator[Finding]:
    found, wanted, steps = {}, both.reference["steps"], both.ranks[0]["steps"]
    for (number, of_ranks), one in zip(both.steps_of_ranks(), wanted, strict=False):
        for finding in _step(both, number, one, of_ranks):
            if finding.kind != "gradient" or "token_weights" not in found:  # which changes gradients too
                found.setdefault(finding.kind or finding.what, finding)
    yield from found.values()
    if "gradients" not in both.compared and not any("gradients" in what for what in both.not_compared):
        both.not_compared["gradients"] = "no step has the same samples as on 1 process"
    if len(wanted) != len(steps) and not found:
        both.not_compared["steps"] = what = f"{len(steps)} steps instead of {len(wanted)}"
        if both.is_exact:
            yield Finding("steps", "steps", what, None, steps[0]["line"])


def _step(both: Comparison, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
    line, facts = steps[0]["line"], both.facts
    if carried := list(_carried(both, number, wanted, steps)):
        yield from carried
        return
    if differing := apart(steps, "gradients"):
        what = f"{differing} have different gradients at the step"
        if not any(micro["syncs"] for micro in steps[0]["micro_batches"]) and facts["ddp"]:
            what += ", and none of its backward passes averages them"
        if facts["around_ddp"]:
            yield Finding("around_ddp", "gradient", what, number, facts["around_ddp"][0])
        else:
            yield Finding("not_reduced", "gradient", what, number, line)
        return
    weights = [total_weight(rank, step) for rank, step in zip(both.ranks, steps, strict=True)]
    if all(weight is not None and close(weight, 1.0) for weight in weights):
        both.compared.add("averaged gradients")
    samples = samples_of(wanted)
    has_same_samples = facts["loaders"] and samples and samples == sum(map(samples_of, steps), collections.Counter())
    draws = next((each["line"] for one in (wanted, *steps) for each in one["micro_batches"] if each["draws"]), "")
    found = list(_gradient(both, number, wanted, steps)) if has_same_samples and not draws else []
    if draws and facts["loaders"]:
        if both.is_exact:
            yield Finding("draws", "random numbers", "the loop draws random numbers", number, draws)
        both.not_compared["gradients"] = f"the loop draws random numbers before {draws}"
    found += losses.findings(both, number, steps)
    yield from found
    if not found and (differing := apart(steps, "at_step")):
        yield Finding("clipped", "clipping", f"{differing} have different gradients after clipping", number, line)
        return
    found_rates = list(rates.findings(both, number, wanted, steps))
    yield from found_rates
    if found_rates:
        return
    if differing := apart(steps, "weights"):
        yield Finding("weights", "weights", f"{differing} have different weights after the step", number, line)
    elif has_same_samples and not draws and not found:
        yield from _weights(both, number, wanted, steps[0])


def _carried(both: Comparison, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
    """Weights and optimizer state at the beginning of a step must be those that were handed on."""
    if not both.reference["weights"]:
        return
    for kind, whose in (("before", "weights"), ("state_before", "state of the optimizer")):
        for rank, step in enumerate(steps):
            found = step[kind]
            names = [name for name, value in wanted[kind].items() if differ(value, found.get(name, value)) > APART]
            if names:
                what = f"{named(names)}: after the step before, rank {rank} changes the {whose} by another amount"
                yield Finding("weights", "weights", f"{what} than 1 process does", number, step["line"])
                return


def _gradient(both: Comparison, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
    found, factors = steps[0]["gradients"], {}
    limit = rounding(wanted["gradients"], both.rounding)
    # Virtual processes add gradients in the same order on any number of processes: the bits are equal.
    tolerance = 0.0 if both.facts["virtual_processes"] else TOLERANCE
    for name, value in wanted["gradients"].items():
        if name not in found:
            what = f"{name} has a gradient on 1 process only"
            yield Finding("unused", "gradient", what, number, steps[0]["line"])
        elif is_other(value, found[name], limit, tolerance):
            factor = float((value[1:] @ found[name][1:]) / (value[1:] @ value[1:]))
            factors[name] = math.nan if is_other(factor * value, found[name], limit, TOLERANCE) else factor
    if not factors:
        both.compared.add("gradients")
        return
    first, line, kind = next(iter(factors.values())), steps[0]["micro_batches"][-1]["line"], "gradient"
    what = f"{named(factors)}: not a multiple of what it is on 1 process"
    if all(close(factor, first, max(1e-2, 10 * both.rounding)) for factor in factors.values()):
        what, kind = f"{named(factors)}: {first:.4g} times what it is on 1 process", "factor"
        if parts(both) > 1 and (close(first, 1 / parts(both)) or close(first, parts(both))):
            kind = "divided_twice" if first < 1 else "not_divided"
    if gathers := steps[0]["gathers"]:
        kind, line, what = "gather", gathers[0], f"{what}, and what it gathers has no gradient"
    if not losses.are_unequal(both, steps):
        yield Finding(kind, "gradient", what, number, line)
    elif samples_of(wanted).total() < largest_step(both.reference) and not both.is_exact:
        # Else losses.findings reports it.
        what = f"the last step of an epoch: {what}, a mean of means over unequal parts"
        yield note("gradient", what, number, line)


def is_other(value: torch.Tensor, found: torch.Tensor, rounding: float, tolerance: float) -> bool:
    """Whether a gradient differs by more than rounding."""
    smaller, larger = sorted((value, found), key=norm_of)
    apart = differ(larger, smaller)
    return apart > tolerance and not apart * norm_of(larger) <= rounding  # it may be NaN


def _weights(both: Comparison, number: int, wanted: dict, step: dict) -> Iterator[Finding]:
    if not both.reference["weights"] or step["options"] != wanted["options"] or both.rounding > ZERO:
        return
    limit = rounding(wanted["at_step"])
    for name, value in wanted["weights"].items():
        gradient = wanted["at_step"].get(name)
        if gradient is None or norm_of(gradient) <= limit or name not in step["weights"]:
            continue  # Adam makes a step of +-lr of a gradient that is all rounding
        counts = gradient.abs() > max(1e-3 * gradient[1:].abs().max(), 10 * EPSILON)
        counts[0] = False
        change, other = value - wanted["before"][name], step["weights"][name] - step["before"][name]
        if counts.any() and differ(change[counts], other[counts]) > 0.02:
            what = f"{name} changes by another amount than on 1 process, from the same gradient"
            yield Finding("weights", "weights", what, number, step["line"])
            return
    both.compared.add("weights")


def statistics(both: Comparison) -> Iterator[Finding]:
    """BatchNorm has the statistics of this process alone, and those of rank 0 are saved."""
    for number, steps in both.steps_of_ranks():
        if differing := apart(steps, "statistics"):
            what = f"{differing} have different running statistics, each its own"
            if both.is_exact:
                yield Finding("statistics", "BatchNorm", what, number, steps[0]["line"])
            else:
                yield note("BatchNorm", f"{what}: those of rank 0 are saved", number, steps[0]["line"])
            return
    if both.is_exact and (differing := apart(both.ranks, "final")):
        what = f"{differing} have different weights after the last step"
        yield Finding("weights", "weights", what, None, both.facts["run"])
