"""What several processes show, compared with one."""

import collections
import itertools
from collections.abc import Iterator

from ..tensors import differ
from ..text import plural
from . import APART, Comparison, Finding, named, note
from .samples import Samples
from .single import Single
from .steps import Steps


class Several(Comparison):
    """All stages, in the order in which things happen."""

    def is_plain(self) -> bool:
        """Whether nothing in the script knows of other processes."""
        return all("accelerate" not in rank["facts"] and "group" not in rank["facts"] for rank in self.ranks)

    def findings(self) -> Iterator[Finding]:
        if self._are_alone():
            line = self.ranks[0]["steps"][0]["micro_batches"][0]["line"] if self.ranks[0]["steps"] else ""
            what = f"{self.processes} processes train alone: nothing averages their gradients"
            yield Finding("alone", "gradient", what, 1, line)
            return
        samples, steps = Samples(self.reference, self.ranks), Steps(self.reference, self.ranks)
        found = list(samples.findings())
        yield from found
        yield from self._initial_weights()
        if steps.parts() > 1:
            yield from Single(self.ranks[0]).of_micro_batches()
        if not any(not finding.is_note for finding in found):
            yield from steps.findings()
            yield from steps.statistics()
        yield from self._reductions()
        yield from self._saves()
        self.compared = samples.compared + steps.compared
        self.not_compared = samples.not_compared | steps.not_compared

    def _are_alone(self) -> bool:
        steps = [step for rank in self.ranks for step in rank["steps"]]
        return not any(rank["facts"]["ddp"] for rank in self.ranks) and not any(step["collectives"] for step in steps)

    def _initial_weights(self) -> Iterator[Finding]:
        first = self.ranks[0]["initial"]
        for number, rank in enumerate(self.ranks[1:], 1):
            apart = [name for name, value in first.items() if differ(value, rank["initial"].get(name, value)) > APART]
            if apart:
                what = f"{named(apart)}: ranks 0 and {number} begin with different weights"
                yield Finding("initial_weights", "initial weights", what, None, self.ranks[0]["steps"][0]["line"])
                return

    def _reductions(self) -> Iterator[Finding]:
        for number, step in enumerate(self.ranks[0]["steps"], 1):
            micro = step["micro_batches"]
            count = sum(bool(each["syncs"]) for each in micro)
            if self.facts["ddp"] and len(micro) > 1 and count == len(micro) and len(self.facts["optimizers"]) == 1:
                what = f"gradients are averaged over processes {count} times per step instead of once: no_sync() "
                yield note("all-reduces", what + "is missing, the numbers are right", number, micro[0]["line"])
                return

    def _saves(self) -> Iterator[Finding]:
        before = {save["line"]: save for save in self.reference["saves"]}
        writers = collections.Counter()
        for rank in self.ranks:
            for place in {(save["path"], save["after"], save["line"]) for save in rank["saves"]}:
                writers[place] += place[0] != "?" and not is_collective(rank, place[2])
        for (path, _, line), count in writers.items():
            if count > 1:
                what = f"{count} processes write {path} at the same time"
                yield Finding("checkpoint_race", "checkpoint", what, None, line)
                break
        for save in self.ranks[0]["saves"]:
            if save["prefix"] and not before.get(save["line"], {"prefix": save["prefix"]})["prefix"]:
                what = f"the names in {save['path']} begin with {save['prefix']!r}, and not on 1 process"
                yield Finding("checkpoint_prefix", "checkpoint", what, None, save["line"])
                break
            if save["prefix"] == "_orig_mod.":
                what = (
                    f"the names in {save['path']} begin with '_orig_mod.': only a compiled model loads them as they are"
                )
                yield note("checkpoint", what, None, save["line"])
                break


def uneven_call(calls: list[list[str]]) -> tuple[str, str] | None:
    """The first collective call that rank 0 makes and another rank does not, or the reverse: words, and the line.

    calls: of each rank, as "6 all_reduce train.py:64": after six steps.
    """
    for rank, others in enumerate(calls[1:], 1):
        for one, other in itertools.zip_longest(calls[0], others):
            if one != other:
                caller, call, lacks = (0, one, rank) if one is not None else (rank, other, 0)
                steps, name, line = call.split(" ", 2)
                return f"after {plural(int(steps), 'step')} rank {caller} calls {name}, and rank {lacks} does not", line
    return None


def is_collective(record: dict, line: str) -> bool:
    """save_state is called by all processes, and writes once."""
    return any(save["line"] == line and save["kind"] == "save_state" for save in record["saves"])
