"""Samples of each epoch: all processes together read those of one process, and each sample once."""

import collections
import functools
import itertools
import operator
from collections.abc import Iterator

from ..records import Loader, Record
from ..text import plural
from . import (
    Comparison,
    Finding,
    Findings,
    Note,
    first_line,
    has_samples,
    is_look,
    largest_step,
    parts_of,
    passes_of,
    samples_of,
    whole_passes,
)

UNKNOWN = "they were not read by a DataLoader that prove can follow"


def findings(comparison: Comparison) -> Findings:
    if not comparison.facts.loaders:
        yield from _own_batches(comparison)
        return
    found, said, passes = [passes_of(rank) for rank in comparison.ranks], set(), passes_of(comparison.reference)
    whole = set.intersection(*map(whole_passes, (comparison.reference, *comparison.ranks)))
    if not passes:
        comparison.not_compared["samples"] = UNKNOWN
    for (key, number), expected in passes.items():
        if number > 0 and not comparison.facts.is_complete:
            continue
        parts = [collections.Counter(rank.get((key, number), [])) for rank in found]
        read = {digest for rank in comparison.ranks for digest in _read(rank, key, number)}
        for finding in _pass(comparison, key, collections.Counter(expected), parts, (key, number) in whole, read):
            if finding.message not in said:
                said.add(finding.message)
                yield finding
    yield from _same_epoch(comparison)
    if "samples" not in comparison.not_compared:
        comparison.compared.add("samples")


def _same_epoch(comparison: Comparison) -> Findings:
    """A DistributedSampler that is only there on several processes, and has the same order in each epoch."""
    passes = [each for each in comparison.ranks[0].passes if each.in_training and each.epoch is not None]
    for one, other in itertools.pairwise(passes):
        loader = comparison.facts.loaders.get(one.key, Loader(""))
        known = comparison.reference.facts.loaders.get(one.key, Loader(""))
        is_new = loader.sampler == "DistributedSampler" != known.sampler and loader.shuffles
        if is_new and one.key == other.key and one.epoch == other.epoch and not is_look(one.read, other.read):
            yield Finding("set_epoch", "samples", "each epoch has the same order", None, loader.line)
            return


def _read(rank: Record, key: str, number: int) -> Iterator[str]:
    """All samples that a process reads in a pass, also those that it does not train on."""
    batches = (batch for each in rank.passes if (each.key, each.number) == (key, number) for batch in each.read)
    return itertools.chain.from_iterable(batch or () for batch in batches)


def _pass(comparison: Comparison, key: str, expected: collections.Counter, parts, is_whole: bool, read: set[str]):
    loader = comparison.facts.loaders.get(key) or comparison.reference.facts.loaders.get(key, Loader(""))
    line, union = loader.line, sum(parts, collections.Counter())
    if not union or not expected:
        comparison.not_compared["samples"] = UNKNOWN
        return
    extra, missing = union - expected, expected - union
    is_whole = is_whole and read.isdisjoint(missing)  # the script may count its steps by its own size of batches
    is_stream = loader.is_iterable and len(parts[0]) > 2
    if all(part == parts[0] for part in parts) and (is_stream or parts[0].total() >= 0.9 * expected.total()):
        count = comparison.processes
        message = f"each of the {count} processes trains on the same samples: each counts {count} times"
        yield Finding("stream" if is_stream else "all_the_data", "samples", message, 1, line)
        return
    shared, batch = (union - functools.reduce(operator.or_, parts)).total(), largest_step(comparison.reference)
    is_batched = loader.line and loader.given is None  # by the script
    is_once = max(expected.values()) == 1  # and not by a sampler that goes on without an end
    if shared > batch and is_once and not loader.is_iterable and (is_batched or loader.is_part or not is_whole):
        message = f"{shared} of {union.total()} samples of an epoch count twice"
        yield Finding("samples", "samples", message, None, line)
        return
    if loader.line and (loader.is_iterable or loader.given is None) and (extra or missing):
        why = "it is an IterableDataset" if loader.given else "the batches are not made by DataLoader"
        comparison.not_compared["samples"] = f"{why} ({line})"
        return
    unknown = [digest for digest in extra if digest not in expected]
    is_small = not unknown and extra.total() <= batch  # what is repeated to fill the last batch
    is_divided_twice = is_whole and is_small and missing.total() >= max(batch, expected.total() // 3)
    if (extra or missing) and (loader.is_part or not is_whole) and not is_divided_twice:
        why = "each process makes its own part of the data" if is_whole else "an epoch trains on a part of its data"
        comparison.not_compared["samples"] = f"{why} ({line})"
        return
    dropped = loader.items - expected.total() if loader.drop_last and loader.items else 0
    tests = [test.samples for test in comparison.reference.evaluations]  # a teacher sees the samples that it teaches
    tested = {each for samples in tests for other, some in samples.items() if other != key for each in some}
    if leaked := tested.intersection(unknown):
        message = f"{plural(len(leaked), 'sample')} of the evaluation on rank 0 are trained on by other processes"
        yield Finding("split", "samples", message, None, line)
    elif len(unknown) > dropped and missing:
        message = f"{plural(len(unknown), 'item')} of {union.total()} are not among those of 1 process"
        yield Finding("items", "samples", message, None, line)
    elif missing and (missing.total() >= batch or not loader.drop_last or comparison.is_exact):
        message = f"{missing.total()} of {expected.total()} samples of an epoch are in no process's part"
        yield Finding("samples", "samples", message, None, line)
    elif unknown and not missing and not shared:
        comparison.not_compared["samples"] = f"the processes read samples that one process does not ({line})"
    elif extra.total() > batch or (extra and comparison.is_exact):
        message = f"{min(extra.total(), expected.total())} of {expected.total()} samples of an epoch count twice"
        yield Finding("samples", "samples", message, None, line)
    elif extra and not unknown:
        is_own = loader.sampler == "DistributedSampler" or not comparison.facts.accelerate
        who = loader.sampler if is_own else "Accelerate"
        message = f"in the last step of an epoch {who} repeats {plural(extra.total(), 'sample')}, so that all "
        yield Note("samples", message + "processes have as many: drop_last=True leaves it out", None, line)


def _own_batches(comparison: Comparison) -> Findings:
    """Batches without a loader: cut by position, all processes together have those of one process; else drawn."""
    made = zip(comparison.steps_of_ranks(), comparison.reference.steps, strict=False)
    if all(has_samples(comparison, expected, steps) for (_, steps), expected in made):
        comparison.compared.add("samples")
        return
    comparison.not_compared["samples and gradients with 1 process"] = "the script draws its own batches"
    on_one = samples_of(comparison.reference.steps[0]).total()
    total = sum(samples_of(rank.steps[0]).total() for rank in comparison.ranks)
    if total == on_one * comparison.processes:
        message = f"a step has {total} samples on {comparison.processes} processes and {on_one} on 1: "
        yield Note("samples", f"{message}right only if that is meant", 1, first_line(comparison.ranks[0].steps[0]))
    for number, steps in comparison.steps_of_ranks():
        drawn = [[part.digests for part in parts_of(step)] for step in steps]
        for rank, batches in enumerate(drawn[1:], 1):
            if any(batch and batch in drawn[0] for batch in batches):
                message = f"ranks 0 and {rank} draw the same batch: each of its samples counts twice"
                yield Finding("same_batches", "samples", message, number, first_line(steps[0]))
                return
