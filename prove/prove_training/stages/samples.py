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
    same_state,
    samples_of,
    whole_passes,
)

UNKNOWN = "they were not read by a DataLoader that prove can follow"


def findings(comparison: Comparison) -> Findings:
    if not comparison.facts.loaders:
        yield from _own_batches(comparison)
        return
    said, passes = set(), passes_of(comparison.reference)
    if not passes:
        comparison.not_compared["samples"] = UNKNOWN
    for (key, number), expected in passes.items():
        if number > 0 and not comparison.facts.is_complete:
            continue
        epoch = Epoch(comparison, key, number, expected)
        result = next(filter(None, (rule(epoch) for rule in RULES)), None)
        if isinstance(result, str):
            comparison.not_compared["samples"] = result
        elif result and result.message not in said:
            said.add(result.message)
            yield result
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


class Epoch:
    """The samples of a pass over the training data, on one process and on several.

    Args:
        key, number: of the pass.
        expected: the samples on one process.
    """

    def __init__(self, comparison: Comparison, key: str, number: int, expected: list[str]):
        self.comparison, self.key, self.expected = comparison, key, collections.Counter(expected)
        self.loader = comparison.facts.loaders.get(key) or comparison.reference.facts.loaders.get(key, Loader(""))
        self.parts = [collections.Counter(passes_of(rank).get((key, number), [])) for rank in comparison.ranks]
        self.union = sum(self.parts, collections.Counter())
        self.extra, self.missing = self.union - self.expected, self.expected - self.union
        self.shared = (self.union - functools.reduce(operator.or_, self.parts)).total()  # by several processes
        self.unknown = [digest for digest in self.extra if digest not in self.expected]
        self.batch = largest_step(comparison.reference)
        # The script may count its steps by its own size of batches, and not train on all that it reads.
        read = {digest for rank in comparison.ranks for digest in _read(rank, key, number)}
        are_whole = ((key, number) in whole_passes(record) for record in (comparison.reference, *comparison.ranks))
        self.is_whole = all(are_whole) and read.isdisjoint(self.missing)
        self.is_made_by_script = bool(self.loader.line) and self.loader.given is None  # its batches

    def finding(self, kind: str, message: str, step: int | None = None) -> Finding:
        return Finding(kind, "samples", message, step, self.loader.line)


def _nothing_known(epoch: Epoch) -> str | None:
    return None if epoch.union and epoch.expected else UNKNOWN


def _same_on_all(epoch: Epoch) -> Finding | str | None:
    """All processes read the same. Items that ignore their index are only the same by the seeds that prove gives."""
    parts, comparison = epoch.parts, epoch.comparison
    is_stream = epoch.loader.is_iterable and len(parts[0]) > 2
    is_all = is_stream or parts[0].total() >= 0.9 * epoch.expected.total()
    if not is_all or any(part != parts[0] for part in parts):
        return None
    if comparison.facts.ignores_index and not same_state(comparison):
        return f"its items are random numbers, whatever their index ({epoch.loader.line})"
    message = f"each of the {len(parts)} processes trains on the same samples: each counts {len(parts)} times"
    return epoch.finding("stream" if is_stream else "all_the_data", message, 1)


def _overlapping_parts(epoch: Epoch) -> Finding | None:
    """Parts that the script makes itself; a sampler that goes on without an end has each sample several times."""
    loader, is_once = epoch.loader, max(epoch.expected.values()) == 1
    is_by_hand = epoch.is_made_by_script or loader.is_part or not epoch.is_whole
    if epoch.shared > epoch.batch and is_once and not loader.is_iterable and is_by_hand:
        return epoch.finding("samples", f"{epoch.shared} of {epoch.union.total()} samples of an epoch count twice")
    return None


def _made_by_script(epoch: Epoch) -> str | None:
    loader = epoch.loader
    if loader.line and (loader.is_iterable or epoch.is_made_by_script) and (epoch.extra or epoch.missing):
        why = "it is an IterableDataset" if loader.given else "the batches are not made by DataLoader"
        return f"{why} ({loader.line})"
    return None


def _part_of_the_data(epoch: Epoch) -> str | None:
    """A part by hand, or an epoch that ends early; but not a part of what a sampler divides as well."""
    is_small = not epoch.unknown and epoch.extra.total() <= epoch.batch  # what is repeated to fill the last batch
    lacks_part = epoch.missing.total() >= max(epoch.batch, epoch.expected.total() // 3)
    is_divided_twice = epoch.is_whole and is_small and lacks_part
    is_part = (epoch.extra or epoch.missing) and (epoch.loader.is_part or not epoch.is_whole)
    if not is_part or is_divided_twice:
        return None
    why = "each process makes its own part of the data" if epoch.is_whole else "an epoch trains on a part of its data"
    return f"{why} ({epoch.loader.line})"


def _other_items(epoch: Epoch) -> Finding | None:
    loader = epoch.loader
    dropped = loader.items - epoch.expected.total() if loader.drop_last and loader.items else 0
    if len(epoch.unknown) > dropped and epoch.missing:
        message = f"{plural(len(epoch.unknown), 'item')} of {epoch.union.total()} are not among those of 1 process"
        return epoch.finding("items", message)
    return None


def _missing_samples(epoch: Epoch) -> Finding | None:
    missing = epoch.missing.total()
    if missing and (missing >= epoch.batch or not epoch.loader.drop_last or epoch.comparison.is_exact):
        message = f"{missing} of {epoch.expected.total()} samples of an epoch are in no process's part"
        return epoch.finding("samples", message)
    return None


def _more_samples(epoch: Epoch) -> str | None:
    if epoch.unknown and not epoch.missing and not epoch.shared:
        return f"the processes read samples that one process does not ({epoch.loader.line})"
    return None


def _repeated_samples(epoch: Epoch) -> Finding | None:
    extra, count = epoch.extra.total(), epoch.expected.total()
    if extra > epoch.batch or (extra and epoch.comparison.is_exact):
        return epoch.finding("samples", f"{min(extra, count)} of {count} samples of an epoch count twice")
    return None


def _filled_batch(epoch: Epoch) -> Note | None:
    if not epoch.extra or epoch.unknown:
        return None
    is_own = epoch.loader.sampler == "DistributedSampler" or not epoch.comparison.facts.accelerate
    who, samples = epoch.loader.sampler if is_own else "Accelerate", plural(epoch.extra.total(), "sample")
    message = f"in the last step of an epoch {who} repeats {samples}, so that all processes have as many: "
    return Note("samples", f"{message}drop_last=True leaves it out", None, epoch.loader.line)


RULES = (  # the first that applies to an epoch ends it: with a finding, or with a text why it cannot be compared
    _nothing_known,
    _same_on_all,
    _overlapping_parts,
    _made_by_script,
    _part_of_the_data,
    _other_items,
    _missing_samples,
    _more_samples,
    _repeated_samples,
    _filled_batch,
)


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
