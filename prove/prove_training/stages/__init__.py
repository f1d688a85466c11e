"""Finds what is wrong in the records of a script, in the order in which things happen: pure functions of records.

`recording` leaves a record of each process. The reference ran on one process, the others on several, with the same
samples in each step, and each step began with the weights of the reference.
"""

import collections
import math
from collections.abc import Iterator
from typing import NamedTuple

from ..records import Part, Record, Step
from ..tensors import differ, norm_of
from ..text import plural

RANK_TOLERANCE = 1e-6  # between ranks
ZERO = 1e-5  # a gradient this small, relative to the largest one, is zero up to rounding
EPSILON = 1.2e-7  # of float32


class Note(NamedTuple):
    """What may be meant, or could not be compared."""

    stage: str
    message: str
    step: int | None = None  # counted from 1; None: not of one step
    line: str = ""  # as "train.py:64"
    kind = ""  # it is not in MISTAKES.md


class Finding(NamedTuple):
    """A mistake."""

    kind: str  # a heading of MISTAKES.md, with _ for -
    stage: str
    message: str
    step: int | None = None
    line: str = ""

    @property
    def place(self) -> str:
        return ", ".join(filter(None, [self.step and f"step {self.step}", self.stage, self.line]))


Findings = Iterator[Finding | Note]


class Comparison:
    """Records of several processes, the reference they are compared with, and what could be compared.

    Args:
        reference: the record of one process.
        ranks: the records of each process.
    """

    def __init__(self, reference: Record, ranks: list[Record]):
        self.reference, self.ranks, self.processes = reference, ranks, len(ranks)
        self.facts, self.is_exact = ranks[0].facts, reference.facts.is_exact
        self.compared, self.not_compared = set(), {}  # subjects; subjects and why not
        self.factors_of_noise = []  # of gradients with random numbers in the loop: the factor, and the line that draws
        self.suspects = []  # gradients with random numbers by sample, of which only a known cause makes a finding
        self.has_drifted = False  # a state that is not shared comes from steps with other weights of the samples
        self.has_repeated = False  # a step had a sample twice, which a state of the script may remember
        self.has_rest = False  # a step had fewer samples: a queue that is gathered has an end within a step after it

    def steps_of_ranks(self) -> Iterator[tuple[int, tuple[Step, ...]]]:
        """Each step by its number, with its record on each rank."""
        return enumerate(zip(*(rank.steps for rank in self.ranks), strict=False), 1)


def close(one: float, other: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)


def named(names) -> str:
    first, *others = names
    return first + (f" and {plural(len(others), 'other')}" if others else "")


# Of one process


def parts_of(step: Step) -> Iterator[Part]:
    """The batches, or parts of them, that a step was made of."""
    return (part for micro in step.micro_batches for part in micro.samples)


def samples_of(step: Step) -> collections.Counter:
    """How often each sample is in a step."""
    return collections.Counter(digest for part in parts_of(step) for digest in part.digests or [])


def largest_step(record: Record) -> int:
    return max((samples_of(step).total() for step in record.steps), default=0)


def trained_on(record: Record) -> set[str]:
    """The loaders of the training data."""
    return {part.key for step in record.steps for part in parts_of(step)}


def passes_of(record: Record) -> dict[tuple[str, int], list[str]]:
    """The samples of each pass over the training data, in order, by loader and number."""
    found = {}
    for step in record.steps:
        for part in parts_of(step):
            if part.key is not None:
                found.setdefault((part.key, part.number), []).extend(part.digests or [])
    return found


def whole_passes(record: Record) -> set[tuple[str, int]]:
    """Those that were read to their end."""
    return {(each.key, each.number) for each in record.passes if each.is_whole}


def is_look(one: list, other: list) -> bool:
    """Whether the second pass reads only the first batches, for example for a quick accuracy, and is not an epoch."""
    return 2 * len(other) < len(one)


def rounding(gradients: dict) -> float:
    """The norm up to which a gradient is zero but for rounding, of the largest one or of numbers near 1 that cancel."""
    largest = max(map(norm_of, gradients.values()), default=0.0)
    return max(ZERO * largest, min(EPSILON, 1e-3 * largest))


def epochs_of(step: Step) -> set[tuple[str, int]]:
    """The passes that a step has samples of, by loader and number."""
    return {(part.key, part.number) for part in parts_of(step) if part.key}


def first_line(step: Step) -> str:
    """The line of the first backward pass of a step, or of optimizer.step(), if no backward pass was seen."""
    return next((micro.line for micro in step.micro_batches), step.line)


# Of several


def has_samples(comparison: Comparison, expected: Step, steps: tuple[Step, ...]) -> bool:
    """Whether all processes together have the samples of one process in a step, by digests that tell them apart.

    Without a loader these are digests of what the model is given, and may all be equal.
    """
    of_ranks = sum(map(samples_of, steps), collections.Counter())
    are_told_apart = bool(comparison.facts.loaders) or 2 * len(of_ranks) > of_ranks.total()
    return bool(of_ranks) and are_told_apart and samples_of(expected) == of_ranks


def ranks_differ(entries: tuple, kind: str) -> str:
    """What differs between two ranks, as "weight and 2 others: ranks 0 and 1"; "" if nothing does."""
    first = getattr(entries[0], kind)
    limit = rounding(first)
    for rank, entry in enumerate(entries[1:], 1):
        names = []
        for name, value in first.items():
            other = getattr(entry, kind).get(name)
            if other is None or (max(norm_of(value), norm_of(other)) > limit and differ(value, other) > RANK_TOLERANCE):
                names.append(name)
        if names:
            return f"{named(names)}: ranks 0 and {rank}"
    return ""


def same_state(comparison: Comparison) -> bool:
    """Whether torch's generators are in one state on all ranks when a pass over the training data begins."""
    states = zip(*(rank.passes for rank in comparison.ranks), strict=False)
    return any(len({each.random for each in passes}) == 1 for passes in states if passes[0].in_training)
