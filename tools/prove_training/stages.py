"""What is wrong in the records of any script, in the order in which things happen: pure functions of records.

A record is what `recording` leaves of one process. The reference ran on one process, the others on several, with the
same samples in each step, and each step began with the weights of the reference.
"""

import collections
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from .tensors import differ
from .text import plural

TOLERANCE = 1e-3  # of a gradient or weight, relative to its largest entry, in one step from the same weights
APART = 1e-6  # between ranks
RESULTS = 1e-4  # of a test that Run has logged
ZERO = 1e-5  # a gradient this small, relative to the largest one, is zero up to rounding
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")


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


class Single:
    """What one process alone shows of a script.

    Args:
        record: of the reference.
    """

    def __init__(self, record: dict):
        self.record, self.steps, self.facts = record, record["steps"], record["facts"]

    def cannot_judge(self) -> str | None:
        """Why there is nothing to compare."""
        if self.facts["starts_processes"]:
            line = self.facts["starts_processes"]
            return f"it starts its processes itself ({line}): prove starts one for each rank, as torchrun does"
        if self.facts["local_sgd"]:
            return f"LocalSGD lets the processes train alone for some steps, on purpose ({self.facts['local_sgd']})"
        kinds = self.facts["optimizers"]
        if "LBFGS" in kinds:
            return "LBFGS computes the loss several times in a step: there is no one gradient to compare"
        if not self.steps:
            return "it ended before the first optimizer.step()"
        if all(not step["micro_batches"] for step in self.steps):
            return "no backward pass came before an optimizer.step()"
        return None

    def findings(self) -> Iterator[Finding]:
        yield from self._order()
        yield from self.of_micro_batches()
        yield from self._saves()
        yield from self._evaluations()
        if self.facts["run"] and self.facts["is_complete"] and not self.facts["is_finished"]:
            yield Finding("finish", "files", "run.finish() is not called: no model is saved", None, self.facts["run"])

    def of_micro_batches(self) -> Iterator[Finding]:
        for number, step in enumerate(self.steps, 1):
            yield from self._accumulation(number, step)
        yield from self._schedule()

    def _evaluations(self) -> Iterator[Finding]:
        for test in self.record["evaluations"]:
            samples = {key: digests for key, digests in test["samples"].items() if key not in trained_on(self.record)}
            if test["in_training"] and samples:
                what = "the model is tested in training mode"
                yield Finding("eval_mode", "evaluation", what, None, test["in_training"])
            tested, counted = sum(map(len, samples.values())), test["result"].get("samples", 0)
            if counted > tested > 0:
                what = f"the result is of {counted:.0f} samples, and the test has {tested}"
                yield Finding("eval_repeated", "evaluation", what, None, test["line"])

    def _order(self) -> Iterator[Finding]:
        passes = passes_of(self.record)
        for (key, number), samples in passes.items():
            loader = self.facts["loaders"].get(key, {})
            before = passes.get((key, number - 1))
            if before is None or samples != before[: len(samples)] or len(set(samples)) < 2:
                continue
            line = loader.get("line", "")
            if loader.get("sampler") == "DistributedSampler" and loader["shuffles"]:
                yield Finding("set_epoch", "samples", "each epoch has the same order", None, line)
            elif loader.get("sampler") == "RandomSampler":
                yield Finding("same_order", "samples", "each epoch has the same order", None, line)
            else:
                yield note("samples", "the training data are not shuffled: each epoch has the same order", None, line)

    def _accumulation(self, number: int, step: dict) -> Iterator[Finding]:
        micro, usual = step["micro_batches"], self.usual_micro_batches()
        if step.get("holds") and len(self.facts["optimizers"]) == 1:
            what = "the gradients of the step before are still there when the next one begins"
            yield Finding("zero_grad", "gradient", what, number, micro[0]["line"])
        epochs = {(part["key"], part["pass"]) for part in parts_of(step) if part["key"]}
        if len({key for key, _ in epochs}) == 1 and len(epochs) > 1:
            what = "has micro-batches of two epochs: those that were left at the end of one are added to the next"
            yield Finding("leftover", "gradient", what, number, micro[0]["line"])
        for done, line in step["clips"]:
            if done < len(micro):
                what = f"clipped after {done} of {len(micro)} micro-batches"
                yield Finding("clip_early", "clipping", what, number, line)
                break
        weights = self.weights(step)
        if weights is None:
            return
        total = self.total_weight(step)
        line = micro[0]["line"]
        if usual > 1 and len(micro) == usual and len(epochs) <= 1:
            if close(total, usual):
                what = f"{usual} times what it should be: the mean over {usual} micro-batches is a sum"
                yield Finding("not_divided", "loss weights", what, number, line)
            elif close(total, 1 / usual):
                what = f"{1 / usual:.4g} times what it should be: divided by {usual} micro-batches twice"
                yield Finding("divided_twice", "loss weights", what, number, line)
        if len(micro) < usual and close(total, len(micro) / usual):
            what = f"{total:.4g} times what it should be: {plural(len(micro), 'micro-batch')}, divided by {usual}"
            if "accelerate" in self.facts:
                yield note("loss weights", f"the last step of an epoch is {what}, by Accelerate", number, line)
            else:
                yield Finding("last_step", "loss weights", what, number, line)

    def usual_micro_batches(self) -> int:
        """The number of micro-batches of most steps."""
        counts = collections.Counter(len(step["micro_batches"]) for step in self.steps)
        return max(counts, key=lambda count: (counts[count], count))

    def weights(self, step: dict) -> list[tuple[float, int, str]] | None:
        """Of each micro-batch: with which coefficient the mean of its losses enters the gradient, the number of
        losses, the line; None where a micro-batch has no loss that is known, or several."""
        found = [micro["losses"] for micro in step["micro_batches"]]
        if len(self.facts["optimizers"]) != 1 or not found or any(len(losses) != 1 for losses in found):
            return None
        return [losses[0] for losses in found]

    def total_weight(self, step: dict) -> float | None:
        """With which factor the mean of the losses of a step enters the gradient; None where that is not known."""
        weights = self.weights(step)
        return None if weights is None else sum(weight for weight, _, _ in weights)

    def _schedule(self) -> Iterator[Finding]:
        usual = self.usual_micro_batches()
        calls = [step["schedule_calls"] for step in self.steps[:4]]
        per_step = {later - earlier for earlier, later in itertools.pairwise(calls)}
        if usual > 1 and per_step == {usual} and len(self.facts["optimizers"]) == 1:
            what = f"the schedule steps {usual} times per step of the optimizer, once per micro-batch"
            if is_exact(self.record):
                yield Finding("schedule", "learning rate", what, 1, self.steps[0]["line"])
            else:
                what += ": right only if its length is counted in micro-batches"
                yield note("learning rate", what, 1, self.steps[0]["line"])

    def _saves(self) -> Iterator[Finding]:
        has_state = any(len(state) for _, states in self.record.get("weights", []) for state in states)
        for save in self.record["saves"]:
            if save["kind"] == "save_state":
                if save["lacks_schedule"]:
                    what = "save_state leaves the schedule out: it was not passed to accelerator.prepare"
                    yield Finding("checkpoint_lacks", "checkpoint", what, None, save["line"])
                continue
            if "model" not in save["has"] or not save["counters"]:
                continue
            lacks = []
            if has_state and "optimizer" not in save["has"]:
                lacks.append("the optimizer")
            if self.facts["schedules"] and "schedule" not in save["has"]:
                lacks.append("the schedule")
            if lacks:
                what = f"{save['path']} has {', '.join(save['counters'])}, and not {' and '.join(lacks)}"
                yield Finding("checkpoint_lacks", "checkpoint", what, None, save["line"])


class Several:
    """What several processes show, compared with one.

    Args:
        reference: the record of one process.
        ranks: the records of each process.
    """

    def __init__(self, reference: dict, ranks: list[dict]):
        self.reference, self.ranks, self.processes = reference, ranks, len(ranks)
        self.facts, self.single, self.is_exact = ranks[0]["facts"], Single(reference), is_exact(reference)
        self.compared, self.not_compared = [], {}
        # Virtual processes add up in the same order on any number of processes: bit for bit the same.
        self.tolerance = 0.0 if self.facts["virtual_processes"] else TOLERANCE

    def is_plain(self) -> bool:
        """Whether nothing in the script knows of other processes."""
        return all("accelerate" not in rank["facts"] and "group" not in rank["facts"] for rank in self.ranks)

    def findings(self) -> Iterator[Finding]:
        if self._are_alone():
            line = self.ranks[0]["steps"][0]["micro_batches"][0]["line"] if self.ranks[0]["steps"] else ""
            what = f"{self.processes} processes train alone: nothing averages their gradients"
            yield Finding("alone", "gradient", what, 1, line)
            return
        samples = list(self._samples())
        yield from samples
        yield from self._initial_weights()
        if self._parts() > 1:
            yield from Single(self.ranks[0]).of_micro_batches()
        if not any(not finding.is_note for finding in samples):
            yield from self._steps()
            yield from self._statistics()
        yield from self._reductions()
        yield from self._saves()

    def _are_alone(self) -> bool:
        steps = [step for rank in self.ranks for step in rank["steps"]]
        return not any(rank["facts"]["ddp"] for rank in self.ranks) and not any(step["collectives"] for step in steps)

    def _parts(self) -> int:
        """How many micro-batches a process makes of what is one on one process."""
        if not self.ranks[0]["steps"]:
            return 1
        return Single(self.ranks[0]).usual_micro_batches() // self.single.usual_micro_batches()

    # Samples

    def _samples(self) -> Iterator[Finding]:
        if not self.facts["loaders"]:
            yield from self._own_batches()
            return
        expected, found = passes_of(self.reference), [passes_of(rank) for rank in self.ranks]
        said = set()
        for (key, number), wanted in expected.items():
            if number > 0 and not self.facts["is_complete"]:
                continue
            parts = [collections.Counter(rank.get((key, number), [])) for rank in found]
            for finding in self._pass(key, collections.Counter(wanted), parts):
                if finding.what not in said:
                    said.add(finding.what)
                    yield finding
        if "samples" not in self.not_compared:
            self.compared.append("samples")

    def _pass(self, key: str, wanted: collections.Counter, parts: list[collections.Counter]) -> Iterator[Finding]:
        loader = self.facts["loaders"].get(key) or self.reference["facts"]["loaders"].get(key, {})
        line, union = loader.get("line", ""), sum(parts, collections.Counter())
        if not union or not wanted:
            self.not_compared["samples"] = "they were not read by a DataLoader that this can follow"
            return
        extra, missing = union - wanted, wanted - union
        if all(part == parts[0] for part in parts) and parts[0].total() >= 0.9 * wanted.total():
            what = f"each of the {self.processes} processes trains on all samples: each counts {self.processes} times"
            yield Finding("all_the_data", "samples", what, 1, line)
            return
        if any(loader.get(fact) for fact in ("is_iterable", "has_own_batches")) and (extra or missing):
            why = "the batches are not made by DataLoader" if loader["has_own_batches"] else "it is an IterableDataset"
            self.not_compared["samples"] = f"{why} ({line})"
            return
        unknown = [digest for digest in extra if digest not in wanted]
        tested = {each for test in self.reference["evaluations"] for some in test["samples"].values() for each in some}
        batch = max((step_size(step) for step in self.reference["steps"]), default=0)
        if leaked := tested.intersection(unknown):
            what = f"{plural(len(leaked), 'sample')} of the evaluation on rank 0 are trained on by other processes"
            yield Finding("split", "samples", what, None, line)
        elif unknown and missing:
            what = f"{plural(len(unknown), 'item')} of {union.total()} are not among those of 1 process"
            yield Finding("items", "samples", what, None, line)
        elif missing and (missing.total() >= batch or not loader.get("drop_last") or self.is_exact):
            what = f"{missing.total()} of {wanted.total()} samples of an epoch are in no process's part"
            yield Finding("samples", "samples", what, None, line)
        elif extra.total() > batch or (extra and self.is_exact):
            what = f"{extra.total()} of {wanted.total()} samples of an epoch count twice"
            yield Finding("samples", "samples", what, None, line)
        elif extra:
            who = "DistributedSampler" if loader.get("sampler") == "DistributedSampler" else "Accelerate"
            what = f"in the last step of an epoch {who} repeats {plural(extra.total(), 'sample')}, so that all "
            yield note("samples", what + "processes have as many: drop_last=True leaves it out", None, line)

    def _own_batches(self) -> Iterator[Finding]:
        self.not_compared["samples and gradients with 1 process"] = "the script draws its own batches"
        for number, steps in enumerate(zip(*(rank["steps"] for rank in self.ranks), strict=False), 1):
            drawn = [[part["digests"] for part in parts_of(step)] for step in steps]
            for rank, batches in enumerate(drawn[1:], 1):
                if any(batch and batch in drawn[0] for batch in batches):
                    what = f"ranks 0 and {rank} draw the same batch: each of its samples counts twice"
                    yield Finding("same_batches", "samples", what, number, steps[0]["micro_batches"][0]["line"])
                    return

    def _initial_weights(self) -> Iterator[Finding]:
        first = self.ranks[0]["initial"]
        for number, rank in enumerate(self.ranks[1:], 1):
            apart = [name for name, value in first.items() if differ(value, rank["initial"].get(name, value)) > APART]
            if apart:
                what = f"{named(apart)}: ranks 0 and {number} begin with different weights"
                yield Finding("initial_weights", "initial weights", what, None, self.ranks[0]["steps"][0]["line"])
                return

    # Steps

    def _steps(self) -> Iterator[Finding]:
        found = {}
        wanted = self.reference["steps"]
        ends = len(wanted) == len(self.ranks[0]["steps"])
        for number, steps in enumerate(zip(wanted, *(rank["steps"] for rank in self.ranks), strict=False), 1):
            for finding in self._step(number, *steps):
                found.setdefault(finding.kind or finding.what, finding)
        yield from found.values()
        if not ends and not found:
            what = f"{len(self.ranks[0]['steps'])} steps instead of {len(wanted)}"
            if self.is_exact:
                yield Finding("steps", "steps", what, None, self.ranks[0]["steps"][0]["line"])
            self.not_compared["steps"] = what

    def _step(self, number: int, wanted: dict, *steps: dict) -> Iterator[Finding]:
        if carried := list(self._carried(number, wanted, steps)):
            yield from carried
            return
        if (ranks_differ := self._apart(steps, "gradients")) is not None:
            names, rank = ranks_differ
            kind = "around_ddp" if self.facts["around_ddp"] else "not_reduced"
            line = self.facts["around_ddp"][0] if self.facts["around_ddp"] else steps[0]["line"]
            what = f"{named(names)}: ranks 0 and {rank} have different gradients at the step"
            if not any(micro["syncs"] for micro in steps[0]["micro_batches"]) and self.facts["ddp"]:
                what += ", and none of its backward passes averages them"
            yield Finding(kind, "gradient", what, number, line)
            return
        has_same_samples = self.facts["loaders"] and samples_of(wanted) == united(steps) and united(steps)
        weights = [weight for rank in self.ranks for weight in [Single(rank).total_weight(steps[rank["rank"]])]]
        if all(weight is not None and close(weight, 1.0) for weight in weights):
            self.compared.append("averaged gradients")
        draws = any(micro["draws"] for step in (wanted, *steps) for micro in step["micro_batches"])
        is_wrong = False
        if has_same_samples and not draws:
            for finding in self._gradient(number, wanted, steps):
                is_wrong = is_wrong or not finding.is_note
                yield finding
        elif draws and self.facts["loaders"]:
            line = next(m["line"] for step in (wanted, *steps) for m in step["micro_batches"] if m["draws"])
            if self.is_exact:
                yield Finding("draws", "random numbers", "the loop draws random numbers", number, line)
            self.not_compared["gradients"] = f"the loop draws random numbers before {line}"
        yield from self._unequal_losses(number, steps)
        if (ranks_differ := self._apart(steps, "at_step")) is not None and not is_wrong:
            names, rank = ranks_differ
            what = f"{named(names)}: ranks 0 and {rank} have different gradients after clipping"
            yield Finding("clipped", "clipping", what, number, steps[0]["line"])
            return
        rates = list(self._rates(number, wanted, steps))
        yield from rates
        if (ranks_differ := self._apart(steps, "weights")) is not None:
            names, rank = ranks_differ
            what = f"{named(names)}: ranks 0 and {rank} have different weights after the step"
            yield Finding("weights", "weights", what, number, steps[0]["line"])
        elif has_same_samples and not draws and not is_wrong and not rates:
            yield from self._weights(number, wanted, steps[0])

    def _carried(self, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
        """Weights and state of the optimizer at the beginning of a step are those that were handed on."""
        if not self.reference.get("weights"):
            return
        for kind, whose in (("before", "weights"), ("state_before", "state of the optimizer")):
            for rank, step in enumerate(steps):
                found = step[kind]
                names = [name for name, value in wanted[kind].items() if differ(value, found.get(name, value)) > APART]
                if names:
                    what = f"{named(names)}: after the step before, rank {rank} changes the {whose} by another amount"
                    yield Finding("weights", "weights", f"{what} than 1 process does", number, step["line"])
                    return

    def _statistics(self) -> Iterator[Finding]:
        """BatchNorm has the statistics of this process alone, and those of rank 0 are saved."""
        for number, steps in enumerate(zip(*(rank["steps"] for rank in self.ranks), strict=False), 1):
            if (ranks_differ := self._apart(steps, "statistics")) is not None:
                what = f"{named(ranks_differ[0])}: the running statistics are those of each process alone"
                if self.is_exact:
                    yield Finding("statistics", "BatchNorm", what, number, steps[0]["line"])
                else:
                    yield note("BatchNorm", f"{what}, and rank 0 saves its own", number, steps[0]["line"])
                return
        if self.is_exact and (ranks_differ := self._apart([rank for rank in self.ranks], "final")) is not None:
            names, rank = ranks_differ
            what = f"{named(names)}: ranks 0 and {rank} have different weights after the last step"
            yield Finding("weights", "weights", what, None, self.facts["run"])

    def _apart(self, steps: tuple[dict, ...], kind: str) -> tuple[list[str], int] | None:
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

    def _gradient(self, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
        found = steps[0]["gradients"]
        limit = ZERO * max((float(value[0]) for value in wanted["gradients"].values()), default=0.0)
        factors = {}
        for name, value in wanted["gradients"].items():
            if name not in found:
                what = f"{name} has a gradient on 1 process only"
                yield Finding("unused", "gradient", what, number, steps[0]["line"])
            elif max(float(value[0]), float(found[name][0])) > limit and differ(value, found[name]) > self.tolerance:
                factor = float((value[1:] @ found[name][1:]) / (value[1:] @ value[1:]))
                factors[name] = factor if differ(factor * value, found[name]) < TOLERANCE else math.nan
        if not factors:
            self.compared.append("gradients")
            return
        names, first = list(factors), next(iter(factors.values()))
        line = steps[0]["micro_batches"][-1]["line"]
        is_last = sum(samples_of(wanted).values()) < step_size(self.reference["steps"][0])
        if all(close(factor, first, 1e-2) for factor in factors.values()):
            what = f"{named(names)}: {first:.4g} times what it is on 1 process"
            parts = self._parts()
            kind = "factor"
            if parts > 1 and (close(first, 1 / parts) or close(first, parts)):
                kind = "divided_twice" if first < 1 else "not_divided"
        else:
            what = f"{named(names)}: not a multiple of what it is on 1 process"
            kind = "gradient"
        if self._are_unequal(steps):
            if not is_last or self.is_exact:
                return  # said with the weights of the losses
            what = f"the last step of an epoch: {what}, a mean of means over unequal parts"
            yield note("gradient", what, number, line)
            return
        yield Finding(kind, "gradient", what, number, line)

    def _weights_of_losses(self, steps: tuple[dict, ...]) -> list[float]:
        """With which weight one loss of each micro-batch of each process enters the gradient."""
        found = []
        for rank, step in zip(self.ranks, steps, strict=True):
            weights = Single(rank).weights(step)
            if weights is None:
                return []
            for micro, (weight, count, _) in zip(step["micro_batches"], weights, strict=True):
                is_stand_in = any(part["digests"] == [] for part in micro["samples"])
                found += [weight / count] if count and not is_stand_in else []
        return found

    def _are_unequal(self, steps: tuple[dict, ...]) -> bool:
        weights = self._weights_of_losses(steps)
        return bool(weights) and not close(min(weights), max(weights))

    def _unequal_losses(self, number: int, steps: tuple[dict, ...]) -> Iterator[Finding]:
        if not self._are_unequal(steps):
            return
        sizes = {samples for step in steps for micro in step["micro_batches"] if (samples := size(micro))}
        weights = self._weights_of_losses(steps)
        if len(sizes) == 1:
            what = (
                f"a token of one micro-batch weighs {max(weights) / min(weights):.3g} times one of another: each has "
            )
            what += "the mean over its own number of tokens"
            yield Finding("token_weights", "loss weights", what, number, steps[0]["micro_batches"][0]["line"])
        else:
            line = steps[0]["micro_batches"][0]["line"]
            what = "in the last step of an epoch a sample of the smaller micro-batch weighs "
            what += f"{max(weights) / min(weights):.3g} times one of the larger: a mean of means"
            if self.is_exact:
                yield Finding("mean_of_means", "loss weights", what, number, line)
            else:
                yield note("loss weights", what, None, line)

    def _rates(self, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
        for rank, step in enumerate(steps):
            for group, (rate, expected) in enumerate(zip(step["rates"], wanted["rates"], strict=False)):
                is_longer = step["schedule_calls"] > wanted["schedule_calls"] and not self.is_exact
                low, high = self._allowed(number, group, is_longer)
                if low <= rate <= high:
                    continue
                if self._is_scaled(rank, group) and not self.is_exact:
                    what = f"{self.processes} times as high on {self.processes} processes: right only where the batch "
                    yield note("learning rate", what + "of a step grows with them", None, step["line"])
                    continue
                place = f"group {group} " if group else ""
                what = f"{place}{rate:.4g} on rank {rank} instead of {expected:.4g}"
                if (factor := self._faster(number, group)) is not None:
                    what += f": the schedule is {factor} times too fast"
                yield Finding("schedule", "learning rate", what, number, step["line"])
                return
        if number > 1:
            self.compared.append("learning rates")

    def _rates_of(self, record: dict, group: int) -> list[float]:
        return [step["rates"][group] for step in record["steps"] if len(step["rates"]) > group]

    def _allowed(self, number: int, group: int, is_stepped_by_accelerate: bool) -> tuple[float, float]:
        """Between which numbers the learning rate of a step must be."""
        rates = self._rates_of(self.reference, group)
        expected = rates[number - 1]
        if not is_stepped_by_accelerate:
            slack = 1e-6 * abs(expected)
            return expected - slack, expected + slack
        # Accelerate steps a schedule once for each process, through about as many times more batches.
        around, slack = 1 + number // 6, 0.02 * max(rates)
        slope = rates[-1] - rates[-2] if len(rates) > 1 else 0.0
        longer = rates + [rates[-1] + slope * more for more in range(1, around + 1)]
        near = longer[max(0, number - 1 - around) : number + around]
        return min(near) - slack, max(near) + slack

    def _is_scaled(self, rank: int, group: int) -> bool:
        """Whether the learning rate of each step is multiplied by the number of processes."""
        rates, expected = self._rates_of(self.ranks[rank], group), self._rates_of(self.reference, group)
        if not expected[0]:  # a warm-up from 0 is doubled by a schedule that steps twice as often
            return False
        return all(close(rate, self.processes * wanted, 1e-6) for rate, wanted in zip(rates, expected, strict=False))

    def _faster(self, number: int, group: int) -> int | None:
        """How many times too fast the schedule is in this step and the next."""
        rates, found = self._rates_of(self.reference, group), self._rates_of(self.ranks[0], group)
        for factor in dict.fromkeys((self.processes, self.single.usual_micro_batches(), 2, 3, 4)):
            places = [at for at in (number - 1, number) if at < len(found) and at * factor < len(rates)]
            if factor > 1 and len(places) == 2 and all(close(found[at], rates[at * factor], 0.02) for at in places):
                return factor
        return None

    def _weights(self, number: int, wanted: dict, step: dict) -> Iterator[Finding]:
        if not self.reference.get("weights") or step["options"] != wanted["options"]:
            return
        for name, value in wanted["weights"].items():
            gradient = wanted["at_step"].get(name)
            if gradient is None or name not in step["weights"]:
                continue
            counts = gradient.abs() > 1e-3 * gradient[1:].abs().max()
            counts[0] = False
            change, other = value - wanted["before"][name], step["weights"][name] - step["before"][name]
            if counts.any() and differ(change[counts], other[counts]) > 0.02:
                what = f"{name} changes by another amount than on 1 process, from the same gradient"
                yield Finding("weights", "weights", what, number, step["line"])
                return
        self.compared.append("weights")

    def _reductions(self) -> Iterator[Finding]:
        for number, step in enumerate(self.ranks[0]["steps"], 1):
            micro = step["micro_batches"]
            count = sum(bool(each["syncs"]) for each in micro)
            if self.facts["ddp"] and len(micro) > 1 and count == len(micro) and len(self.facts["optimizers"]) == 1:
                what = f"gradients are averaged over processes {count} times per step instead of once: no_sync() "
                yield note("all-reduces", what + "is missing, the numbers are right", number, micro[0]["line"])
                return

    # Files

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


def size(micro: dict) -> int:
    return sum(len(part["digests"] or []) for part in micro["samples"])


def step_size(step: dict) -> int:
    return sum(size(micro) for micro in step["micro_batches"])


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
