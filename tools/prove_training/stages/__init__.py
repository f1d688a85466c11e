"""What is wrong in the records of any script, in the order in which things happen: pure functions of records.

A record is what `recording` leaves of one process. The reference ran on one process, the others on several, with the
same samples in each step, and each step began with the weights of the reference.
"""

import collections
import math
from collections.abc import Iterator
from typing import NamedTuple

from ..tensors import differ
from ..text import plural

TOLERANCE = 1e-3  # of a gradient or weight, relative to its largest entry, in one step from the same weights
APART = 1e-6  # between ranks
ZERO = 1e-5  # a gradient this small, relative to the largest one, is zero up to rounding


class Finding(NamedTuple):
    """Something that is wrong, or worth knowing."""

    kind: str  # of mistakes.ADVICE; "" for a note
    stage: str
    what: str
    step: int | None = None  # counted from 1; None: not of one step
    line: str = ""  # as "train.py:64"

    @property
    def is_note(self) -> bool:
        return not self.kind

    @property
    def place(self) -> str:
        return ", ".join(filter(None, [self.step and f"step {self.step}", self.stage, self.line]))


def note(stage: str, what: str, step: int | None = None, line: str = "") -> Finding:
    return Finding("", stage, what, step, line)


def close(one: float, other: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)


def parts_of(step: dict) -> Iterator[dict]:
    """The batches, or parts of them, that a step of one process was made of."""
    return (part for micro in step["micro_batches"] for part in micro["samples"])


def samples_of(step: dict) -> collections.Counter:
    """How often each sample is in a step of one process."""
    return collections.Counter(digest for part in parts_of(step) for digest in part["digests"] or [])


def trained_on(record: dict) -> set[str]:
    """The loaders of the training data."""
    return {part["key"] for step in record["steps"] for part in parts_of(step)}


def united(steps: list[dict]) -> collections.Counter:
    return sum((samples_of(step) for step in steps), collections.Counter())


def passes_of(record: dict) -> dict[tuple[str, int], list[str]]:
    """The samples of each pass over the training data, in order, by loader and number."""
    found = {}
    for step in record["steps"]:
        for part in parts_of(step):
            if part["key"] is not None:
                found.setdefault((part["key"], part["pass"]), []).extend(part["digests"] or [])
    return found


def is_exact(record: dict) -> bool:
    """Whether the script trains through GlobalLoader, which needs no allowance for unequal parts."""
    return any(loader["is_exact"] for loader in record["facts"]["loaders"].values())


def named(names: list[str]) -> str:
    others = f" and {plural(len(names) - 1, 'other')}" if len(names) > 1 else ""
    return names[0] + others


def size(micro: dict) -> int:
    return sum(len(part["digests"] or []) for part in micro["samples"])


def step_size(step: dict) -> int:
    return sum(size(micro) for micro in step["micro_batches"])


class Comparison:
    """Records of several processes, and the reference that they are compared with.

    Args:
        reference: the record of one process.
        ranks: the records of each process.
    """

    def __init__(self, reference: dict, ranks: list[dict]):
        self.reference, self.ranks, self.processes = reference, ranks, len(ranks)
        self.facts, self.is_exact = ranks[0]["facts"], is_exact(reference)
        self.compared, self.not_compared = [], {}


def apart(steps: tuple[dict, ...], kind: str) -> tuple[list[str], int] | None:
    """The names of what differs between rank 0 and another rank, and that rank."""
    first = steps[0].get(kind, {})
    limit = ZERO * max((float(value[0]) for value in first.values()), default=0.0)
    for rank, step in enumerate(steps[1:], 1):
        names = [
            name
            for name, value in first.items()
            if name not in step[kind] or (float(value[0]) > limit and differ(value, step[kind][name]) > APART)
        ]
        if names:
            return names, rank
    return None
