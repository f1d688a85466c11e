"""Learning rates: the same for each group in each step."""

from collections.abc import Iterator

from . import Comparison, Finding, close, note
from .single import usual_micro_batches


def findings(both: Comparison, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
    for rank, step in enumerate(steps):
        for group, (rate, expected) in enumerate(zip(step["rates"], wanted["rates"], strict=False)):
            found, known = rates_of(both.ranks[rank], group), rates_of(both.reference, group)
            is_longer = step["schedule_calls"] > wanted["schedule_calls"] and not both.is_exact
            low, high = allowed(known, number, is_longer)
            if low <= rate <= high:
                continue
            if are_scaled(found, known, both.processes) and not both.is_exact:
                what = f"{both.processes} times as high on {both.processes} processes: right only where the batch "
                yield note("learning rate", what + "of a step grows with them", None, step["line"])
                continue
            what = f"group {group}: " * bool(group)
            if rate != (first := steps[0]["rates"][group]):
                what += f"a rate of {first:.4g} on rank 0 and of {rate:.4g} on rank {rank}"
                yield Finding("schedule_alone", "learning rate", what, number, step["line"])
                return
            what += f"{rate:.4g} on rank {rank} instead of {expected:.4g}"
            for factor in (both.processes, usual_micro_batches(both.reference), 2, 3, 4):
                if are_faster(found, known, number, factor):
                    part = "warm-up" if known[0] < expected < known[min(number, len(known) - 1)] else "schedule"
                    what += f": the {part} is {factor} times too fast"
                    break
            yield Finding("schedule", "learning rate", what, number, step["line"])
            return
    if number > 1:
        both.compared.add("learning rates")


def rates_of(record: dict, group: int) -> list[float]:
    """The learning rate of a group in each step; 0 before the group was added."""
    return [step["rates"][group] if group < len(step["rates"]) else 0.0 for step in record["steps"]]


def allowed(known: list[float], number: int, is_stepped_by_accelerate: bool) -> tuple[float, float]:
    """The lowest and highest learning rate that a step may have."""
    expected = known[number - 1]
    if not is_stepped_by_accelerate:
        slack = 1e-6 * abs(expected)
        return expected - slack, expected + slack
    # Accelerate steps a schedule once per process, which the script made for as many times more batches.
    around, slack = 1 + number // 6, 0.02 * max(known)
    slope = known[-1] - known[-2] if len(known) > 1 else 0.0
    longer = known + [known[-1] + slope * more for more in range(1, around + 1)]
    near = longer[max(0, number - 1 - around) : number + around]
    return min(near) - slack, max(near) + slack


def are_scaled(found: list[float], known: list[float], processes: int) -> bool:
    """Whether the learning rate of each step is multiplied by the number of processes."""
    # A schedule that steps twice as often doubles a warm-up from 0.
    return bool(known[0]) and all(close(rate, processes * one, 1e-6) for rate, one in zip(found, known, strict=False))


def are_faster(found: list[float], known: list[float], number: int, factor: int) -> bool:
    """Whether the schedule is `factor` times too fast in this step and the next."""
    places = [at for at in (number - 1, number) if at < len(found) and at * factor < len(known)]
    return factor > 1 and len(places) == 2 and all(close(found[at], known[at * factor], 0.02) for at in places)
