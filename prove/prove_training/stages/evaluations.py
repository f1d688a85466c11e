"""Compares the numbers that a script prints, logs or passes to Run after each evaluation."""

import collections
import functools
import itertools
import math
import operator
import re
from collections.abc import Iterator
from typing import NamedTuple

from ..records import Evaluation
from ..text import plural
from . import Comparison, Finding, Findings, close, samples_of, trained_on

RESULTS = 1e-4  # tolerance of a result that Run has logged
CUTS = 3  # calls of gather_for_metrics; fewer are not in each batch, and cut no repeated samples
CLOCK = re.compile(r"(?<![\w.@:])\d+:[0-5]\d(?::[0-5]\d)?(?:[.,]\d{3,})?(?![\w.:])")  # 12:31:08,512 or 0:01
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")


class Suspect(NamedTuple):
    """A printed number that differs."""

    expected: Evaluation  # the evaluation of the reference
    ranks: list[Evaluation]  # the same on each rank
    words: str  # before the number, in the line
    value: float  # in the reference
    other: float  # on rank 0
    right_line: str  # of the reference
    line: str  # of rank 0

    @property
    def key(self) -> tuple[int, str]:
        return self.expected.after, self.words

    @property
    def says(self) -> str:
        return f'it says "{self.line.strip()[:200]}", and on 1 process "{self.right_line.strip()[:200]}"'


def pairs(comparison: Comparison) -> Iterator[tuple[Evaluation, list[Evaluation]]]:
    """The evaluations of the reference, and those of each rank after the same number of steps."""
    for expected in comparison.reference.evaluations:
        found = [[each for each in rank.evaluations if each.after == expected.after] for rank in comparison.ranks]
        if found[0]:
            yield expected, [each[0] for each in found if each]


def are_compared(comparison: Comparison) -> bool:
    return any(test.result or (not test.draws and NUMBER.search(" ".join(test.said))) for test, _ in pairs(comparison))


def suspects(comparison: Comparison) -> list[Suspect]:
    """All printed numbers that differ."""
    return [
        Suspect(expected, ranks, *found)
        for expected, ranks in pairs(comparison)
        if not expected.draws
        for found in differing(expected.said, ranks[0].said)
    ]


def differing_results(comparison: Comparison) -> Findings:
    """Results passed to Run.log_test that differ."""
    for expected, ranks in pairs(comparison):
        for name, value in expected.result.items():
            for number, rank in enumerate(ranks):
                other = rank.result.get(name, math.nan)
                if abs(value - other) > RESULTS * max(abs(value), abs(other), RESULTS):
                    message = f"{name} is {other:.6g} on rank {number} instead of {value:.6g}, from the same weights"
                    yield Finding("eval_mean", "evaluation", message, None, rank.line)
                    return


def share(comparison: Comparison) -> Findings:
    """An evaluation of a part of the samples, without a collective call."""
    trained = trained_on(comparison.reference)
    for expected, ranks in pairs(comparison):
        total, own = (
            sum(len(samples) for key, samples in test.samples.items() if key not in trained)
            for test in (expected, ranks[0])
        )
        are_added = any(rank.collectives for rank in ranks)
        if total and own < 0.9 * total and not are_added:
            message = f"rank 0 sees {own} of {total} samples, and nothing adds up the parts of the processes"
            yield Finding("eval_share", "evaluation", message, None, ranks[0].line)
            return
        if not are_added and (found := _share_without_loader(comparison, ranks)):
            yield found
            return


def _share_without_loader(comparison: Comparison, ranks: list[Evaluation]) -> Finding | None:
    """A result of what rank 0 alone has tested, where other processes have tested something else, and said nothing."""
    trained = {sample for record in comparison.ranks for step in record.steps for sample in samples_of(step)}
    own, *others = (collections.Counter(row for row in test.inputs if row not in trained) for test in ranks)
    says = [NUMBER.search(" ".join(test.said)) for test in ranks]
    is_of_all = functools.reduce(operator.or_, others, own) == own
    if is_of_all or not (own and says[0]) or any(says[1:]) or any(test.draws for test in ranks):
        return None
    tested = f"{own.total()} rows, and nothing adds up the {sum(map(collections.Counter.total, others))} of the others"
    return Finding("eval_share", "evaluation", f"rank 0 tells a result of {tested}", None, ranks[0].line)


def explained(comparison: Comparison, suspect: Suspect) -> Finding:
    """The finding for a result that differs."""
    for found in share(comparison):
        return found._replace(message=f"{found.message}: {suspect.says}")
    for rank, test in enumerate(suspect.ranks):
        if differing_models(suspect.ranks[0], test):
            message = f"the tested model has other weights on rank {rank} than on rank 0: {suspect.says}"
            return Finding("eval_weights", "evaluation", message, None, test.line)
    calls = [call for rank in suspect.ranks for call in rank.collectives]
    line = next((line for name, line in calls if name != "reduce"), suspect.ranks[0].line)
    repeated = _repeated(suspect)
    cuts = [name for name, _ in suspect.ranks[0].collectives].count("gather_for_metrics")
    if repeated and cuts < CUTS:
        message = f"{plural(repeated, 'sample')} counted twice: {suspect.says}"
        return Finding("eval_repeated", "evaluation", message, None, line)
    if calls and all(name.endswith(("(MAX)", "(MIN)")) for name, _ in calls):
        message = f"the extreme of the processes is taken, and not their sum: {suspect.says}"
        return Finding("eval_extreme", "evaluation", message, None, line)
    factor = suspect.other / suspect.value if suspect.value else 0.0
    if close(factor, comparison.processes, 1e-2) or close(factor, 1 / comparison.processes, 1e-2):
        message = f"{factor:.4g} times the result of 1 process: {suspect.says}"
        return Finding("eval_factor", "evaluation", message, None, line)
    return Finding("eval_mean", "evaluation", f"{suspect.says}, from the same weights and samples", None, line)


def differing_models(one: Evaluation, other: Evaluation) -> bool:
    """Whether a model that two processes test has other weights on the second one."""
    sums = zip(one.models.values(), other.models.values(), strict=False)
    return any(repr(first) != repr(second) for first, second in sums)  # both may be NaN


def _repeated(suspect: Suspect) -> int:
    extra = 0
    for key, samples in suspect.expected.samples.items():
        parts = [rank.samples.get(key, []) for rank in suspect.ranks]
        if any(part != parts[0] for part in parts):
            extra += (collections.Counter(itertools.chain(*parts)) - collections.Counter(samples)).total()
    return extra


def differing(expected: list[str], found: list[str]) -> Iterator[tuple[str, float, float, str, str]]:
    """Numbers but of clocks that differ by more than their last digit, in lines with the same words.

    Yields: the words before the number, its values, and its lines in `expected` and in `found`.
    """
    left = collections.defaultdict(list)
    expected, found = ([" ".join(CLOCK.sub("", line).split()) for line in lines] for lines in (expected, found))
    for line in found:
        left[template_of(line)].append(line)
    for line in expected:
        template = template_of(line)
        if not left[template]:
            continue
        other = left[template].pop(0)
        for match, number in zip(NUMBER.finditer(line), NUMBER.finditer(other), strict=True):
            if not same_number(match[0], number[0]):
                words = NUMBER.sub("#", line[: match.start()]).split("#")[-1].strip()
                yield words, float(match[0]), float(number[0]), line, other


def template_of(line: str) -> str:
    """A line without its numbers, and without spaces: they align numbers, and are as many as these leave."""
    return NUMBER.sub("#", line).replace(" ", "")


def same_number(one: str, other: str) -> bool:
    digits = min(len(text.partition(".")[2].partition("e")[0]) for text in (one, other))
    return abs(float(one) - float(other)) <= max(1.01 * 10.0**-digits if digits else 0.0, 1e-5 * abs(float(one)))
