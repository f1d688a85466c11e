"""Each step, which starts from the same weights: its losses, gradients, learning rates and weights."""

import collections
import dataclasses
import math

import torch

from ..records import Record, Step, Values
from ..tensors import differ, norm_of
from . import (
    EPSILON,
    RANK_TOLERANCE,
    Comparison,
    Finding,
    Findings,
    Note,
    close,
    first_line,
    has_samples,
    largest_step,
    named,
    ranks_differ,
    rounding,
    samples_of,
)
from .single import OF_BATCH_NORM, total_weight, usual_micro_batches, weights

NOTHING = 10 * EPSILON  # the norm of gradients that are rounding alone, and no multiple of each other
TOLERANCE = 1e-3  # of a gradient or weight, relative to its largest entry
NEARLY = 9e-3  # a factor of 1 but for rounding: bfloat16 has 4e-3


def findings(comparison: Comparison) -> Findings:
    found, expected, steps = {}, comparison.reference.steps, comparison.ranks[0].steps
    for (number, of_ranks), one in zip(comparison.steps_of_ranks(), expected, strict=False):
        if number > 1 and number - 1 not in comparison.reference.weights:
            comparison.not_compared[f"steps after {number - 1}"] = "there is no space for all weights between them"
            break
        for finding in _step(comparison, number, one, of_ranks):
            found.setdefault(finding.kind or finding.message, finding)
    if (factors := comparison.factors_of_noise) and not all(close(each, factors[0][0], 1e-2) for each, _ in factors):
        comparison.compared.discard("gradients")
        why = f"the loop draws random numbers, and not for each sample alone ({factors[0][1]})"
        comparison.not_compared["gradients"] = why
        found.pop("factor", None)  # by chance, in some steps only
    for kind in ("factor", "gradient") if "token_weights" in found else ():
        found.pop(kind, None)  # a step of which one process has all tokens shows a factor
    yield from found.values()
    if "gradients" not in comparison.compared and not any("gradients" in name for name in comparison.not_compared):
        comparison.not_compared["gradients"] = "no step has the same samples as on 1 process"
    if len(expected) != len(steps) and not found:
        comparison.not_compared["steps"] = message = f"{len(steps)} steps instead of {len(expected)}"
        if comparison.is_exact:
            yield Finding("steps", "steps", message, None, steps[0].line)


def learning_rates(comparison: Comparison) -> Findings:
    for (number, of_ranks), one in zip(comparison.steps_of_ranks(), comparison.reference.steps, strict=False):
        yield from _rates(comparison, number, one, of_ranks)


def _step(comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...]) -> Findings:
    """A step by its phases: weights, reduction, gradients, losses, clipping, learning rates, and weights after it."""
    if findings := [*_carried(comparison, number, expected, steps)] or [*_not_reduced(comparison, number, steps)]:
        yield from findings
        return
    if steps[0].in_step and ranks_differ(steps, "gradients"):  # the optimizer averages them
        steps = (dataclasses.replace(steps[0], gradients=averaged(steps, "gradients")), *steps[1:])
    is_compared = has_samples(comparison, expected, steps)
    findings, is_compared = _gradients(comparison, number, expected, steps, is_compared)
    if comparison.is_exact and (line := noise_of((expected, *steps))):
        yield Finding("draws", "random numbers", "the loop draws random numbers", number, line)
    findings += _losses(comparison, number, expected, steps)
    if not findings and not steps[0].in_step and (differing := ranks_differ(steps, "at_step")):
        message = f"{differing} have different gradients after clipping"
        yield Finding("clipped", "clipping", message, number, steps[0].line)
        return
    if not findings and is_compared and steps[0].clips and expected.clips:
        findings += _gradient(comparison, number, expected, steps, "at_step")
    yield from findings
    if rates := list(_rates(comparison, number, expected, steps)):
        yield from rates
    elif differing := ranks_differ(steps, "weights"):
        message = f"{differing} have different weights after the step"
        yield Finding("weights", "weights", message, number, steps[0].line)
    elif is_compared and not findings and not comparison.has_drifted:
        yield from _weights(comparison, number, expected, steps[0])


def _not_reduced(comparison: Comparison, number: int, steps: tuple[Step, ...]) -> Findings:
    """The processes must step with the same gradients, unless the optimizer averages them."""
    if steps[0].in_step or not (differing := ranks_differ(steps, "gradients")):
        return
    facts, message = comparison.facts, f"{differing} have different gradients at the step"
    if steps[0].clips and not ranks_differ(steps, "at_step"):
        message = "clipped before the gradients are averaged, by the norm that each process has alone"
        yield Finding("clip_early", "clipping", message, number, steps[0].clips[-1][1])
        return
    syncs = [micro.syncs for micro in steps[0].micro_batches]
    if facts.ddp and not any(syncs):
        message += ", and none of its backward passes averages them"
    elif facts.ddp and not syncs[-1]:
        first = syncs.index(True) + 1
        message += f": averaged after micro-batch {first} of {len(syncs)}, and not after the last one"
    kind, line = ("around_ddp", facts.around_ddp[0]) if facts.around_ddp else ("not_reduced", steps[0].line)
    yield Finding(kind, "gradient", message, number, line)


def is_by_sample(steps: tuple[Step, ...]) -> bool:
    """Whether all draws are by sample. After others, such as one coin for a batch, a gradient shows no cause."""
    draws_others = any(micro.draws for step in steps for micro in step.micro_batches)
    return not draws_others and all(draw.is_repeated for step in steps for draw in step.drawn)


def noise_of(steps: tuple[Step, ...]) -> str:
    """The line of a draw of random numbers, first of one that is not by sample, or of the backward pass after it."""
    drawn = sorted((draw for step in steps for draw in step.drawn), key=lambda draw: draw.is_repeated)
    others = [micro.line for step in steps for micro in step.micro_batches if micro.draws]
    if others and (not drawn or drawn[0].is_repeated):
        return others[0]
    return drawn[0].line if drawn else ""


def _gradients(
    comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...], is_compared: bool
) -> tuple[list[Finding | Note], bool]:
    """Findings of the gradients before clipping, and whether they were compared.

    They are not where a state of the script may remember other samples, and where random numbers may be drawn by the
    place in the batch: then only equal gradients, or one factor in all steps, show something.
    """
    totals = [total_weight(rank, step) for rank, step in zip(comparison.ranks, steps, strict=True)]
    by_hand = factor_by_hand(steps)
    if all(total is not None and close(total * by_hand, 1.0) for total in totals):
        comparison.compared.add("averaged gradients")
    may_remember = remembers(comparison, expected, steps)
    if is_compared and (noise := noise_of((expected, *steps))):
        factor = one_factor(factors_of(comparison, expected, steps))
        is_compared = not math.isnan(factor)
        if is_compared or not is_rest(comparison, expected):
            comparison.factors_of_noise.append((factor, noise))
            if not is_compared and is_by_sample((expected, *steps)):
                suspect = Finding("gradient", "gradient", "", number, expected.micro_batches[-1].line)
                comparison.suspects.append(suspect)
    findings = list(_gradient(comparison, number, expected, steps)) if is_compared else []
    has_means = all(total is not None and close(total, 1.0) for total in totals)
    is_wrong = findings[0].kind == "factor" if findings else has_means and not is_compared
    if is_wrong and close(by_hand, comparison.processes):
        message = f"the processes' gradients are added up, and not divided by {comparison.processes}"
        return [Finding("summed", "gradient", message, number, steps[0].collectives[-1][1])], is_compared
    if may_remember and [each.kind for each in findings] == ["gradient"] and not comparison.is_exact:
        why = "a step had a sample twice, or fewer samples, which a state of the script may remember"
        comparison.not_compared.setdefault("gradients after it", why)
        comparison.has_drifted = True
        return [], is_compared
    return findings, is_compared


def remembers(comparison: Comparison, expected: Step, steps: tuple[Step, ...]) -> bool:
    """Whether a state of the script may come from other samples than on 1 process, in the steps before this one."""
    samples, of_ranks = samples_of(expected), sum(map(samples_of, steps), collections.Counter())
    gathers = any("gather" in name for name, _ in steps[0].collectives)
    result = comparison.has_repeated or (comparison.has_rest and gathers)
    is_shorter, has_loaders = is_rest(comparison, expected), bool(comparison.facts.loaders)
    comparison.has_repeated |= has_loaders and samples < of_ranks
    comparison.has_drifted |= steps[0].in_step and (is_shorter or not (has_loaders and samples and samples == of_ranks))
    comparison.has_rest |= is_shorter
    return result


def is_rest(comparison: Comparison, expected: Step) -> bool:
    """Whether a step has fewer samples than others, as at the end of an epoch."""
    return samples_of(expected).total() < largest_step(comparison.reference)


def _carried(comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...]) -> Findings:
    """Weights and optimizer state at the beginning of a step must be the shared ones."""
    if not comparison.reference.weights:
        return
    whole = {"before": "weights"} if steps[0].in_step else {"before": "weights", "state_before": "optimizer state"}
    for kind, whose in whole.items():
        for rank, step in enumerate(steps):
            found = getattr(step, kind)
            names = [
                name
                for name, value in getattr(expected, kind).items()
                if (other := found.get(name, value)).shape == value.shape and differ(value, other) > RANK_TOLERANCE
            ]
            if names:
                message = f"{named(names)}: after the step before, rank {rank} changes the {whose} by another amount"
                yield Finding("weights", "weights", f"{message} than 1 process does", number, step.line)
                return


def averaged(steps: tuple[Step, ...], kind: str) -> Values:
    """The mean of the gradients of all ranks."""
    gradients = {}
    for name, value in getattr(steps[0], kind).items():
        parts = [getattr(step, kind).get(name, torch.zeros_like(value))[1:] for step in steps]
        mean = sum(parts) / len(steps)
        gradients[name] = torch.cat([torch.linalg.vector_norm(mean).view(1), mean])  # of the recorded entries
    return gradients


def factor_by_hand(steps: tuple[Step, ...]) -> float:
    """By which factor of their mean the script has replaced the processes' gradients; NaN if by no one factor."""
    if not all(step.own for step in steps):
        return 1.0
    means = averaged(steps, "own")
    pairs = [(mean[1:], steps[0].gradients[name][1:]) for name, mean in means.items() if name in steps[0].gradients]
    factors = [float(mean @ found / (mean @ mean)) for mean, found in pairs if mean @ mean > 0]
    return factors[0] if factors and all(close(factor, factors[0]) for factor in factors) else math.nan


def _gradient(
    comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...], kind_of: str = "gradients"
) -> Findings:
    """Compare gradients before clipping, or those that the optimizer gets: "at_step"."""
    values, found = getattr(expected, kind_of), getattr(steps[0], kind_of)
    for name in [name for name in values if name not in found]:
        yield Finding("unused", "gradient", f"{name} has a gradient on 1 process only", number, steps[0].line)
    factors = factors_of(comparison, expected, steps, kind_of)
    if not factors:
        comparison.compared.add("gradients")
        return
    if steps[0].in_step:
        comparison.not_compared["gradients"] = f"the optimizer reduces them itself ({steps[0].line})"
        return
    line = steps[0].micro_batches[-1].line
    if math.isnan(one_factor(factors)) and max(map(norm_of, [*values.values(), *found.values()])) < NOTHING:
        comparison.not_compared["gradients"] = f"they are rounding alone, as where all inputs are equal ({line})"
        return
    finding = _difference(comparison, expected, steps, kind_of, factors)._replace(step=number)
    if not are_unequal(coefficients(comparison, steps)):
        yield finding
    elif is_rest(comparison, expected) and not comparison.is_exact:
        # Else _losses reports it.
        message = f"the last step of an epoch: {finding.message}, a mean of means over unequal parts"
        yield Note("gradient", message, number, finding.line)


def _difference(
    comparison: Comparison, expected: Step, steps: tuple[Step, ...], kind_of: str, factors: dict[str, float]
) -> Finding:
    """The finding for gradients that differ, by one factor or by none."""
    first, micro, kind = one_factor(factors), steps[0].micro_batches[-1], "gradient"
    message, line = "not a multiple of what it is on 1 process", micro.line
    if math.isnan(first) or (comparison.has_repeated and close(first, 1.0, 0.05)):  # by a sample that was there twice
        for name, value in expected.buffers.items():
            if any(step.buffers.get(name, value) != value for step in steps) and not name.endswith(OF_BATCH_NORM):
                message += f": the buffer {name} differs, which each forward pass changes by its own samples"
    else:
        kind, message = "factor", f"{first:.4g} times what it is on 1 process"
        if close(first, 1.0, NEARLY):
            one, other = getattr(expected, kind_of), getattr(steps[0], kind_of)
            most, kind = max(differ(one[name], other[name]) for name in factors), "float_sums"
            message = f"other bits than on 1 process, by up to {most:.1e} of its value"
        totals = [total_weight(rank, step) or 0.0 for rank, step in zip(comparison.ranks, steps, strict=True)]
        is_before = kind_of == "gradients"
        if is_before and all(close(total, 1.0) for total in totals):
            message += ", and the loss is not: the gradient is changed after the backward pass"
        elif is_before and micro.losses and not micro.scales:
            message += f", between the loss and its backward pass at {line}"
            line = micro.losses[-1][2]
    message += ", after clipping" * (kind_of == "at_step")
    for name, line_of_call in steps[0].gathers[:1]:
        kind, line, message = "gather", line_of_call, f"{message}, and no gradient goes through {name}"
    return Finding(kind, "gradient", f"{named(factors)}: {message}", None, line)


def factors_of(
    comparison: Comparison, expected: Step, steps: tuple[Step, ...], kind_of: str = "gradients"
) -> dict[str, float]:
    """For each parameter whose gradient differs: the factor between the two, or NaN if there is none."""
    values, found, factors = getattr(expected, kind_of), getattr(steps[0], kind_of), {}
    limit, tolerance = rounding(values), TOLERANCE
    if comparison.facts.virtual_processes:  # they add in the same order on any number of processes: the bits are equal
        limit, tolerance = 0.0, 0.0
    for name, value in values.items():
        if name in found and is_other(value, found[name], limit, tolerance):
            factor = float((value[1:] @ found[name][1:]) / (value[1:] @ value[1:]))
            factors[name] = math.nan if is_other(factor * value, found[name], limit, TOLERANCE) else factor
    return factors


def one_factor(factors: dict[str, float]) -> float:
    """The factor of all parameters; NaN if they have several or none."""
    first = next(iter(factors.values()), 1.0)
    return first if all(close(factor, first, 1e-2) for factor in factors.values()) else math.nan


def with_cause(reference: Record, own: list[Record], finding: Finding | Note) -> Finding | Note:
    """A finding of gradients, with its cause if each process divides by a number of its own samples.

    Args:
        own: the records of processes that keep the gradients of their own samples.
    """
    number = finding.step or 0
    if finding.kind != "gradient" or not all(len(record.steps) >= number > 0 for record in own):
        return finding
    parts = shares(reference.steps[number - 1], tuple(record.steps[number - 1] for record in own))
    if not parts:
        return finding
    shares_of_ranks = " and ".join(f"{part:.3g}" for part in parts)
    message = f"each process has the mean over its own targets, mask or weights: they count 1/{len(own)} each, and "
    message += f"should count {shares_of_ranks}"
    return Finding("token_weights", "loss weights", message, number, finding.line)


def shares(expected: Step, steps: tuple[Step, ...]) -> list[float]:
    """By which weights the processes' own gradients add up to the gradient on one process; [] if by none.

    They are the parts of a total, such as of all tokens, where each process has divided by its own part. Equal parts
    are the mean that the processes take, and no cause.
    """
    limit, every = rounding(expected.gradients), [step.own or step.gradients for step in steps]
    names = [name for name, value in expected.gradients.items() if norm_of(value) > limit]
    if not names or not all(set(names) <= set(gradients) for gradients in every):
        return []
    found = torch.stack([torch.cat([gradients[name][1:] for name in names]) for gradients in every], 1)
    right = torch.cat([expected.gradients[name][1:] for name in names])
    parts = torch.linalg.lstsq(found, right[:, None]).solution[:, 0]
    rest = float(torch.linalg.vector_norm(found @ parts - right) / torch.linalg.vector_norm(right))
    is_sum = len(right) > 4 * len(steps) and rest < TOLERANCE and bool((parts > 0).all())
    is_equal = close(float(parts.min()), float(parts.max()), 1e-2)
    return parts.tolist() if is_sum and close(float(parts.sum()), 1.0) and not is_equal else []


def is_other(value: torch.Tensor, found: torch.Tensor, rounding: float, tolerance: float) -> bool:
    """Whether a gradient differs by more than rounding."""
    smaller, larger = sorted((value, found), key=norm_of)
    distance = differ(larger, smaller)
    return distance > tolerance and not distance * norm_of(larger) <= rounding  # it may be NaN


def _weights(comparison: Comparison, number: int, expected: Step, step: Step) -> Findings:
    if not comparison.reference.weights or step.options != expected.options:
        return
    limit = rounding(expected.at_step)
    for name, value in expected.weights.items():
        gradient = expected.at_step.get(name)
        if gradient is None or norm_of(gradient) <= limit or name not in step.weights:
            continue  # Adam makes a step of +-lr of a gradient that is all rounding
        counts = gradient.abs() > max(1e-3 * gradient[1:].abs().max(), 10 * EPSILON)
        change, other = value - expected.before[name], step.weights[name] - step.before[name]
        counts &= change.abs() > 50 * EPSILON * value.abs()  # else most of it is rounding of the weight
        counts[0] = False
        if counts.any() and differ(change[counts], other[counts]) > 0.02:
            message = f"{name} changes by another amount than on 1 process, from the same gradient"
            yield Finding("weights", "weights", message, number, step.line)
            return
    comparison.compared.add("weights")


def _rates(comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...]) -> Findings:
    reference = comparison.reference
    for rank, (record, step) in enumerate(zip(comparison.ranks, steps, strict=True)):
        has_more = len(record.steps) != len(reference.steps)  # of which it may be a fraction
        is_longer = (step.schedule_calls > expected.schedule_calls or has_more) and not comparison.is_exact
        for group, (rate, right) in enumerate(zip(step.rates, expected.rates, strict=False)):
            found, known = rates_of(record, group), rates_of(reference, group)
            low, high = allowed(known, number, is_longer)
            margin = 0.05 * comparison.has_repeated * (not comparison.is_exact)  # by the number of samples
            if low * (1 - margin) <= rate <= high * (1 + margin):
                continue
            bases = [each.bases[group] for each in (expected, step)]
            if (factor := scale(found, known, bases, comparison.processes)) and not comparison.is_exact:
                message = f"{factor:.3g} times as high on {comparison.processes} processes: right only where the batch "
                yield Note("learning rate", message + "of a step grows with them", None, step.line)
                continue
            message = f"group {group}: " * bool(group)
            if rate != (first := steps[0].rates[group]):
                message += f"a rate of {first:.4g} on rank 0 and of {rate:.4g} on rank {rank}"
                yield Finding("schedule_alone", "learning rate", message, number, step.line)
                return
            message += f"{rate:.4g} on rank {rank} instead of {right:.4g}"
            for factor in (comparison.processes, usual_micro_batches(reference), 2, 3, 4):
                if are_faster(found, known, number, factor):
                    part = "warm-up" if known[0] < right < known[min(number, len(known) - 1)] else "schedule"
                    message += f": the {part} is {factor} times too fast"
                    break
            yield Finding("schedule", "learning rate", message, number, step.line)
            return
    if number > 1:
        comparison.compared.add("learning rates")


def rates_of(record: Record, group: int) -> list[float]:
    """The learning rate of a group in each step; 0 before the group was added."""
    return [step.rates[group] if group < len(step.rates) else 0.0 for step in record.steps]


def allowed(known: list[float], number: int, is_longer: bool) -> tuple[float, float]:
    """The lowest and highest learning rate that a step may have."""
    expected = known[number - 1]
    if not is_longer:
        slack = 1e-6 * abs(expected)
        return expected - slack, expected + slack
    # Accelerate steps a schedule once per process, so scripts lengthen it by that factor. If an epoch has a different
    # number of steps, its milestones are rounded.
    around, slack = 1 + number // 6, 0.02 * max(known)
    slope = known[-1] - known[-2] if len(known) > 1 else 0.0
    longer = known + [known[-1] + slope * more for more in range(1, around + 1)]
    near = longer[max(0, number - 1 - around) : number + around]
    return min(near) - slack, max(near) + slack


def scale(found: list[float], known: list[float], bases: list[float], processes: int) -> float:
    """The factor by which the learning rate before its schedule, or the highest, grows with the processes, or 0.0."""
    one, other = bases if all(bases) else (max(known), max(found))
    return next((factor for factor in (processes, math.sqrt(processes)) if close(other, factor * one)), 0.0)


def are_faster(found: list[float], known: list[float], number: int, factor: int) -> bool:
    """Whether the schedule is `factor` times too fast in this step and the next."""
    places = [at for at in (number - 1, number) if at < len(found) and at * factor < len(known)]
    return factor > 1 and len(places) == 2 and all(close(found[at], known[at * factor], 0.02) for at in places)


def coefficients(comparison: Comparison, steps: tuple[Step, ...]) -> list[float]:
    """The coefficient of one loss, for each micro-batch of each process; [] where it is not known."""
    pairs = []
    for rank, step in zip(comparison.ranks, steps, strict=True):
        known = weights(rank, step)
        if known is None:
            return []
        for micro, (weight, count, _) in zip(step.micro_batches, known, strict=True):
            is_stand_in = any(part.digests == [] for part in micro.samples)
            pairs += [(weight, count)] if count and not is_stand_in else []
    # A single loss may have a weight of its own, such as an advantage: it counts if it is a mean like the others.
    means = [weight for weight, count in pairs if count > 1]
    return [weight / count for weight, count in pairs if count > 1 or any(close(weight, mean) for mean in means)]


def are_unequal(found: list[float]) -> bool:
    return bool(found) and not close(min(found), max(found))


def _losses(comparison: Comparison, number: int, expected: Step, steps: tuple[Step, ...]) -> Findings:
    found, line = coefficients(comparison, steps), first_line(steps[0])
    if not are_unequal(found):
        return
    times = f"{max(found) / min(found):.3g} times"
    micro_batches = [micro for step in steps for micro in step.micro_batches]
    sizes = {sum(len(part.digests or []) for part in micro.samples) for micro in micro_batches}
    if len(sizes - {0}) == 1:
        message = f"a token of one micro-batch weighs {times} one of another: each has the mean over its own tokens"
        yield Finding("token_weights", "loss weights", message, number, line)
        return
    is_last = is_rest(comparison, expected)
    message = "in the last step of an epoch" if is_last else "where the micro-batches of a step have different sizes"
    message += f", a sample of the smaller micro-batch weighs {times} one of the larger: a mean of means"
    if comparison.is_exact:
        yield Finding("mean_of_means", "loss weights", message, number, line)
    else:
        yield Note("loss weights", message, None, line)


def statistics(comparison: Comparison) -> Findings:
    """BatchNorm has the statistics of this process alone, and those of rank 0 are saved."""
    for number, steps in comparison.steps_of_ranks():
        if differing := ranks_differ(steps, "statistics"):
            message = f"{differing} have different running statistics, each its own"
            if comparison.is_exact:
                yield Finding("statistics", "BatchNorm", message, number, steps[0].line)
            else:
                yield Note("BatchNorm", f"{message}: those of rank 0 are saved", number, steps[0].line)
            return
    if comparison.is_exact and (differing := ranks_differ(comparison.ranks, "final")):
        message = f"{differing} have different weights after the last step"
        yield Finding("weights", "weights", message, None, comparison.facts.run)
