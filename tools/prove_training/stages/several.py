"""Compares several processes with one: all stages, in the order in which things happen."""

import collections
import itertools
from collections.abc import Iterator

from ..text import plural
from . import Comparison, Finding, apart, first_line, note, samples, single, steps


def are_plain(ranks: list[dict]) -> bool:
    """Whether the script uses neither Accelerate nor a process group."""
    return not any(rank["facts"].keys() & {"accelerate", "group"} for rank in ranks)


def findings(both: Comparison) -> Iterator[Finding]:
    made = [step for rank in both.ranks for step in rank["steps"]]
    if not any(rank["facts"]["ddp"] for rank in both.ranks) and not any(step["collectives"] for step in made):
        what = f"{both.processes} processes train alone: nothing averages their gradients"
        yield Finding("alone", "gradient", what, 1, first_line(made[0]) if made else "")
        return
    found = list(samples.findings(both))
    yield from found
    yield from _initial_weights(both)
    if steps.parts(both) > 1:
        yield from single.micro_batches(both.ranks[0])
    if not any(finding.kind for finding in found):
        yield from steps.findings(both)
        yield from steps.statistics(both)
    yield from _reductions(both)
    yield from _saves(both)


def _initial_weights(both: Comparison) -> Iterator[Finding]:
    if differing := apart(both.ranks, "initial"):
        what = f"{differing} begin with different weights"
        yield Finding("initial_weights", "initial weights", what, None, both.ranks[0]["steps"][0]["line"])


def _reductions(both: Comparison) -> Iterator[Finding]:
    for number, step in enumerate(both.ranks[0]["steps"], 1):
        count = len(step["micro_batches"])
        are_all = all(micro["syncs"] for micro in step["micro_batches"])
        if both.facts["ddp"] and count > 1 and are_all and len(both.facts["optimizers"]) == 1:
            what = f"gradients are averaged over processes {count} times per step instead of once: no_sync() "
            yield note("all-reduces", what + "is missing, the numbers are right", number, first_line(step))
            return


def _saves(both: Comparison) -> Iterator[Finding]:
    writers = collections.Counter()
    for rank in both.ranks:  # all processes call save_state; only one writes
        writers.update(
            {(save["path"], save["after"], save["line"]) for save in rank["saves"] if save["kind"] != "save_state"}
        )
    for (path, _, line), count in writers.items():
        if count > 1 and path != "?":
            what = f"{count} processes write {path} at the same time"
            yield Finding("checkpoint_race", "checkpoint", what, None, line)
            break
    before = {save["line"]: save["prefix"] for save in both.reference["saves"]}
    for save in both.ranks[0]["saves"]:
        what = f"the names in {save['path']} begin with {save['prefix']!r}"
        if save["prefix"] and before.get(save["line"]) == "":
            yield Finding("checkpoint_prefix", "checkpoint", f"{what}, and not on 1 process", None, save["line"])
            break
        if save["prefix"] == "_orig_mod.":
            yield note("checkpoint", f"{what}: only a compiled model loads them as they are", None, save["line"])
            break


def uneven_call(calls: list[list[str]]) -> tuple[str, str] | None:
    """The first collective call that rank 0 makes and another rank does not, or the reverse: a message, and the line.

    calls: of each rank, as "6 all_reduce train.py:64", where 6 is the number of steps before the call.
    """
    for rank, others in enumerate(calls[1:], 1):
        for one, other in itertools.zip_longest(calls[0], others):
            if one != other:
                caller, call, lacks = (0, one, rank) if one is not None else (rank, other, 0)
                steps, name, line = call.split(" ", 2)
                return f"after {plural(int(steps), 'step')} rank {caller} calls {name}, and rank {lacks} does not", line
    return None
