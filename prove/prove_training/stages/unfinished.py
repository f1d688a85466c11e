"""Says why a run on several processes has not ended: pure functions of its records and collective calls."""

import itertools

from ..records import Loader, Record
from ..text import plural
from . import Finding, named, whole_passes


def explain(stage: str, ranks: list[Record], error: str | None, waits: list[str], calls: list[list[str]]) -> Finding:
    """The finding for a run that has failed, or waits forever.

    Args:
        stage: such as "the run on 2 processes".
        ranks: the records of the processes that left one.
        error: of the first process that failed.
        waits: where each process stood when time ran out.
        calls: collective calls of each process, as "6 all_reduce train.py:64 3x4": after 6 steps, with this shape.
    """
    found = _unused(ranks)
    if not found and (waits or "gloo" in error or "onnection" in error):
        found = _uneven_batches(ranks) or _ended(ranks) or uneven_call(calls)
    if not found:
        found = ("hangs", f"it waits forever: {', '.join(waits)}", "") if waits else ("fails", error, "")
    kind, message, line = found
    return Finding(kind, stage, message, None, line)


def _unused(ranks: list[Record]) -> tuple[str, str, str] | None:
    """The kind, a message and a line where DistributedDataParallel misses the gradients of some parameters."""
    for rank in ranks:
        if names := rank.unused:
            message = f"{named(names)}: no gradient on rank {rank.rank} in step {len(rank.steps)}, and "
            return "unused", f"{message}DistributedDataParallel waits for it", rank.error.partition(": ")[0]
    return None


def _uneven_batches(ranks: list[Record]) -> tuple[str, str, str] | None:
    """The same where an epoch has fewer batches on one rank than on another."""
    passes = [{(each.key, each.number): each.batches for each in rank.passes} for rank in ranks]
    for one, other in itertools.permutations(range(len(ranks)), 2):
        for key, number in whole_passes(ranks[one]) & passes[other].keys():
            batches = passes[one][key, number]
            if number is not None and batches < passes[other][key, number]:
                message = f"an epoch has {plural(batches, 'batch')} on rank {one}, and more on rank {other}"
                return "uneven", message, ranks[one].facts.loaders.get(key, Loader("")).line
    return None


def _ended(ranks: list[Record]) -> tuple[str, str, str] | None:
    """The same where a rank has left the training loop, and another one is still in it."""
    ended = [rank for rank in ranks if not rank.error and not rank.waits]
    for rank, other in itertools.product(ranks, ended):
        doing, _, line = (rank.waits or rank.doing).rpartition(" at ")
        if doing.endswith("pass"):
            message = f"rank {other.rank} has ended after {plural(len(other.steps), 'step')}"
            return "stops_alone", f"{message}, and rank {rank.rank} waits {doing} of {line}", line
    return None


def uneven_call(calls: list[list[str]]) -> tuple[str, str, str] | None:
    """The same for the first collective call that not all ranks make, or not with the same shape."""
    for rank, others in enumerate(calls[1:], 1):
        for one, other in itertools.zip_longest(calls[0], others):
            if one != other:
                caller, call, lacks = (0, one, rank) if one is not None else (rank, other, 0)
                *where, shape = call.split(" ", 3)
                message = f"after {plural(int(where[0]), 'step')} rank {caller} calls {where[1]}"
                if one and other and other.split(" ", 3)[:3] == where:
                    message += f" with a tensor of {shape}, and rank {lacks} with one of {other.split(' ', 3)[3]}"
                    return "shapes", message, where[2]
                return "hangs", f"{message}, and rank {lacks} does not", where[2]
    return None
