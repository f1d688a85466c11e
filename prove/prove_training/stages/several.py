"""Compares several processes with one: all stages, in the order in which things happen."""

import collections
import itertools

from . import Comparison, Finding, Findings, Note, close, first_line, ranks_differ, same_state, samples, single, steps


def findings(comparison: Comparison) -> Findings:
    made = [step for rank in comparison.ranks for step in rank.steps]
    are_reduced = any(step.collectives or step.in_step for step in made)
    if not any(rank.facts.ddp for rank in comparison.ranks) and not are_reduced:
        message = f"{comparison.processes} processes train alone: nothing averages their gradients"
        yield Finding("alone", "gradient", message, 1, first_line(made[0]) if made else "")
        return
    if line := comparison.facts.data_parallel:
        message = "nn.DataParallel gives each process all GPUs of its machine"
        yield Finding("data_parallel", "model", message, None, line)
    found = list(samples.findings(comparison))
    yield from found
    yield from _initial_weights(comparison)
    yield from single.loaded(comparison.ranks[0]) if not comparison.reference.facts.loads_nothing else ()
    yield from _draws(comparison)
    _note_repeated_draws(comparison)
    yield from _plateaus(comparison)
    if not any(each.kind for each in found):
        yield from steps.findings(comparison)
        yield from steps.statistics(comparison)
    yield from _reductions(comparison)
    yield from _saves(comparison)


def _initial_weights(comparison: Comparison) -> Findings:
    if differing := ranks_differ(comparison.ranks, "initial"):
        message = f"{differing} begin with different weights"
        yield Finding("initial_weights", "initial weights", message, None, comparison.ranks[0].steps[0].line)


def _draws(comparison: Comparison) -> Findings:
    """The same random numbers for the samples of different processes: the first of these that is found."""
    finders = (noise, _worker_seeds, _augmentation)
    yield from itertools.islice(itertools.chain.from_iterable(find(comparison) for find in finders), 1)


def noise(comparison: Comparison) -> Findings:
    """Three draws by sample from generators in one state. Their shapes may differ, as by padding, and then the later
    states differ, too."""
    by_line = collections.defaultdict(list)
    for number, of_ranks in comparison.steps_of_ranks():
        for draws in zip(*(step.drawn for step in of_ranks), strict=False):
            is_per_sample = all(draw.is_per_sample and draw.rows > 1 for draw in draws)
            if is_per_sample and len({(draw.line, draw.state) for draw in draws}) == 1:
                by_line[draws[0].line].append((number, draws[0]))
    for line, ((number, draw), *others) in by_line.items():
        message = f"{draw.name} draws the same numbers on all processes, for different samples"
        if len(others) < 2:
            continue
        if draw.in_model or len(comparison.facts.optimizers) > 1:
            yield Note("random numbers", f"{message}: seed + rank gives each its own", number, line)
        else:
            yield Finding("same_noise", "random numbers", message, number, line)


def _note_repeated_draws(comparison: Comparison) -> None:
    """Three steps that draw the numbers of an earlier one, as in pytorch/pytorch#5059: they may be meant."""
    first, again = {}, {}
    for number, step in enumerate(comparison.reference.steps, 1):
        for draw in (draw for draw in step.drawn if draw.is_per_sample and draw.rows > 1):
            if (before := first.setdefault((draw.line, draw.state), number)) < number:
                message = f"{draw.name} draws those of step {before} again in step {number} ({draw.line})"
                again.setdefault(number, message)
    if len(again) > 2:
        comparison.not_compared["random numbers"] = next(iter(again.values()))


def _worker_seeds(comparison: Comparison) -> Findings:
    seeds = [rank.facts.worker_seeds for rank in comparison.ranks]
    for line in seeds[0] if comparison.facts.draws_others else ():
        if all(each.get(line) == seeds[0][line] for each in seeds):
            message = "worker_init_fn gives the workers of each process the same numbers, and in each epoch"
            yield Finding("worker_seeds", "random numbers", message, None, line)


def _augmentation(comparison: Comparison) -> Findings:
    if any(record.facts.draws_items for record in (comparison.reference, *comparison.ranks)) and same_state(comparison):
        message = "the augmentation draws the same numbers on all processes: seed + rank gives each its own"
        yield Note("random numbers", message)


def _plateaus(comparison: Comparison) -> Findings:
    for calls in zip(*(rank.plateaus for rank in comparison.ranks), strict=False):
        for rank, (value, line) in enumerate(calls):
            if not close(value, calls[0][0], 1e-4) and value == value:  # it may be NaN
                message = f"ReduceLROnPlateau gets {calls[0][0]:.5g} on rank 0 and {value:.5g} on rank {rank}"
                yield Finding("plateau", "learning rate", message, None, line)
                return


def _reductions(comparison: Comparison) -> Findings:
    for number, step in enumerate(comparison.ranks[0].steps, 1):
        count = len(step.micro_batches)
        are_all = all(micro.syncs for micro in step.micro_batches)
        if comparison.facts.ddp and count > 1 and are_all and len(comparison.facts.optimizers) == 1:
            message = f"gradients are averaged over processes {count} times per step instead of once: no_sync() "
            yield Note("all-reduces", message + "is missing, the numbers are right", number, first_line(step))
            return


def _saves(comparison: Comparison) -> Findings:
    writers = collections.Counter()
    for rank in comparison.ranks:  # all processes call save_state; only one writes
        writers.update({(save.path, save.after, save.line) for save in rank.saves if save.kind != "save_state"})
    for (path, _, line), count in writers.items():
        if count > 1 and path != "?":
            message = f"{count} processes write {path} at the same time"
            yield Finding("checkpoint_race", "checkpoint", message, None, line)
            break
    states = [[save for save in rank.saves if save.kind == "save_state"] for rank in comparison.ranks]
    if states[0] and not all(states):
        message = "rank 0 alone calls save_state: the random states of the others are not saved, and with FSDP it hangs"
        yield Note("checkpoint", message, None, states[0][0].line)
    before = {save.line: save.prefix for save in comparison.reference.saves}
    for save in comparison.ranks[0].saves:
        message = f"the names in {save.path} begin with {save.prefix!r}"
        if save.prefix and before.get(save.line) == "":
            message += ", and not on 1 process"
            if comparison.facts.strips_prefix:
                yield Note("checkpoint", f"{message}: the script takes it off", None, save.line)
            else:
                yield Finding("checkpoint_prefix", "checkpoint", message, None, save.line)
            break
        if save.prefix == "_orig_mod.":
            yield Note("checkpoint", f"{message}: only a compiled model loads them as they are", None, save.line)
            break
