"""Compares what is said after each evaluation."""

import collections
import itertools
import math
import re
from collections.abc import Iterator

from ..text import plural
from . import Finding, trained_on

RESULTS = 1e-4  # of a test that Run has logged
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")


class Evaluations:
    """Compares what is said after each evaluation.

    Args:
        reference, ranks: as in `Several`.
    """

    def __init__(self, reference: dict, ranks: list[dict]):
        self.reference, self.ranks, self.processes = reference, ranks, len(ranks)
        self.trained = trained_on(reference)

    def pairs(self) -> Iterator[tuple[dict, list[dict]]]:
        """The evaluations of the reference, and those of each rank after the same number of steps."""
        for wanted in self.reference["evaluations"]:
            found = [[each for each in rank["evaluations"] if each["after"] == wanted["after"]] for rank in self.ranks]
            if found[0]:
                yield wanted, [each[0] for each in found if each]

    def are_compared(self) -> bool:
        said = [test for test, _ in self.pairs() if test["result"] or NUMBER.search(" ".join(test["said"]))]
        return any(test["result"] or not test["draws"] for test in said)

    def suspects(self) -> list[tuple[int, str, str, str]]:
        """Numbers that differ: after how many steps, the line's words, the number on one process, and here."""
        found = []
        for wanted, ranks in self.pairs():
            if wanted["draws"]:
                continue
            for template, number, other in differing(wanted["said"], ranks[0]["said"]):
                found.append((wanted["after"], template, number, other))
        return found

    def differing_results(self) -> Iterator[Finding]:
        """Numbers that Run.log_test was given."""
        for wanted, ranks in self.pairs():
            for name, value in wanted["result"].items():
                for number, rank in enumerate(ranks):
                    other = rank["result"].get(name, math.nan)
                    if abs(value - other) > RESULTS * max(abs(value), abs(other), RESULTS):
                        what = f"{name} is {other:.6g} on rank {number} instead of {value:.6g}, from the same weights"
                        yield Finding("eval_mean", "evaluation", what, None, rank["line"])
                        return

    def share(self) -> Finding | None:
        """An evaluation in which no process learns of the samples of the others."""
        for wanted, ranks in self.pairs():
            total, own = self._count(wanted), self._count(ranks[0])
            if total and own < 0.9 * total and not any(rank["collectives"] for rank in ranks):
                what = f"rank 0 sees {own} of {total} samples, and nothing adds up the parts of the processes"
                return Finding("eval_share", "evaluation", what, None, ranks[0]["line"])
        return None

    def finding(self, after: int, template: str, number: str, other: str) -> Finding:
        """What to say of a result that differs."""
        _, ranks = next(pair for pair in self.pairs() if pair[0]["after"] == after)
        if (found := self.share()) is not None:
            return found._replace(what=f"{found.what}: it says {quoted(template, other)} instead of {number}")
        wanted = next(each for each in self.reference["evaluations"] if each["after"] == after)
        repeated = self._repeated(wanted, ranks)
        names = {name for rank in ranks for name, _ in rank["collectives"]}
        line = next(
            (line for rank in ranks for name, line in rank["collectives"] if name != "reduce"), ranks[0]["line"]
        )
        says = f"it says {quoted(template, other)} instead of {number}"
        if repeated and "gather_for_metrics" not in names:
            what = f"{repeated} of {plural(len_of(wanted), 'sample')} counted twice: {says}"
            return Finding("eval_repeated", "evaluation", what, None, line)
        return Finding("eval_mean", "evaluation", f"{says}, from the same weights and samples", None, line)

    def _count(self, test: dict) -> int:
        """Samples that are tested, and not trained on."""
        return sum(len(samples) for key, samples in test["samples"].items() if key not in self.trained)

    def _repeated(self, wanted: dict, ranks: list[dict]) -> int:
        extra = 0
        for key, samples in wanted["samples"].items():
            found = collections.Counter(itertools.chain(*(rank["samples"].get(key, []) for rank in ranks)))
            if not all(rank["samples"].get(key) == ranks[0]["samples"].get(key) for rank in ranks):
                extra += (found - collections.Counter(samples)).total()
        return extra


def len_of(test: dict) -> int:
    return sum(len(samples) for samples in test["samples"].values())


def quoted(template: str, number: str) -> str:
    words = template.partition("#")[0].strip()[-40:]
    return f'"{words} {number}"' if words else number


def differing(wanted: list[str], found: list[str]) -> Iterator[tuple[str, str, str]]:
    """Of lines that have the same words: those words, and each number that differs by more than its last digit."""
    left = collections.defaultdict(list)
    for line in found:
        left[NUMBER.sub("#", line)].append(line)
    for line in wanted:
        template = NUMBER.sub("#", line)
        if not left[template]:
            continue
        places = zip(NUMBER.finditer(line), NUMBER.finditer(left[template].pop(0)), strict=True)
        for match, other in places:
            if not same_number(match[0], other[0]):
                before = NUMBER.sub("#", line[: match.start()])
                yield before.split("#")[-1] + "#", match[0], other[0]


def same_number(one: str, other: str) -> bool:
    digits = min(len(text.partition(".")[2].partition("e")[0]) for text in (one, other))
    return abs(float(one) - float(other)) <= max(1.01 * 10.0**-digits if digits else 0.0, 1e-5 * abs(float(one)))
