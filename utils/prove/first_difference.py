"""The first thing in which two recorded runs differ, in the order of training, and its likely cause."""

import collections
import math
from collections.abc import Iterator
from typing import NamedTuple

from ..console import plural
from .causes import cause
from .differences import tensor_difference

ROUNDING = 1e-5  # a gradient this small, relative to the largest one, is zero up to rounding
APART = 1e-6  # what the ranks of one run may differ by, relative to the largest entry
RESUMED_AFTER = 2  # steps: in the middle of the first epoch
COUNTERS = "_batches_tracked"  # of BatchNorm: not a result
# What rounding can change.
NUMBERS = {"values", "gradients", "gradients at the step", "weights", "optimizer", "test values", "test result"}


class Finding(NamedTuple):
    """The first thing in which a run differs from its reference."""

    step: int | None  # None: in the test, or at the end
    stage: str
    what: str
    cause: str
    expected: bool = False  # not a mistake: the model looks across samples, or rounding grows

    @property
    def place(self) -> str:
        if self.stage == "checkpoint":
            return "at the end, checkpoint"
        return f"in {'test' if self.step is None else f'step {self.step}'}, {self.stage}"


def relative(reference, other) -> float:
    return tensor_difference(reference, other, zero_scale=1.0)


class Samples:
    """What is recorded of the samples of a step or a test, over all ranks, by item."""

    def __init__(self, micro_batches: list[dict]):
        self.count = collections.Counter()
        self.digests, self.values, self.inputs = {}, {}, {}
        for part in micro_batches:
            items = part["indices"].tolist()
            self.count.update(items)
            for place, item in enumerate(items):
                if part["digests"] is not None:
                    self.digests.setdefault(item, []).append(part["digests"][place])
                if part.get("inputs") is not None:
                    self.inputs[item] = part["inputs"][place].tolist()
                for metric, numbers in part["values"].items():
                    self.values.setdefault(metric, {}).setdefault(item, []).append(numbers[place].item())
        for found in (self.digests, *self.values.values()):
            for entries in found.values():
                entries.sort()

    def other_items(self, reference: "Samples") -> str:
        """The items that come too often or are missing, as text; "" if there are none."""
        more, missing = (
            sorted((a - b).elements()) for a, b in ((self.count, reference.count), (reference.count, self.count))
        )
        said = [f"items {', '.join(map(str, more[:5]))} come too often"] if more else []
        said += [f"items {', '.join(map(str, missing[:5]))} are missing"] if missing else []
        return " and ".join(said)

    def other_value(self, reference: "Samples", tolerance: float) -> str:
        """The value that differs most beyond the tolerance, relative to the metric's largest, as text."""
        for metric, values in self.values.items():
            expected = reference.values[metric]
            scale = max((abs(v) for numbers in expected.values() for v in numbers), default=0.0) or 1.0
            worst, largest = "", tolerance * scale
            for item, numbers in values.items():
                for value, wanted in zip(numbers, expected[item], strict=True):
                    difference = math.inf if math.isnan(value) != math.isnan(wanted) else abs(value - wanted)
                    if difference > largest:
                        worst = f"{metric} of item {item} is {value:.6g} instead of {wanted:.6g}"
                        largest = difference
            if worst:
                return worst
        return ""

    def other_inputs(self, reference: "Samples") -> bool:
        """Whether the model was given something else for an item, of the same size."""
        for item, (size, norm) in self.inputs.items():
            expected = reference.inputs.get(item, [None])
            if size == expected[0] and not math.isclose(norm, expected[1], rel_tol=APART, abs_tol=APART):
                return True
        return False


class Comparison:
    """Compares the records of a run's ranks with those of a reference.

    Args:
        reference, ranks: the records of each rank, as `read_records` returns them.
        tolerance: relative; 0: bit for bit.
        resumed: the run was resumed in the middle.
        same_parts: both cut a step into the same micro-batches, so that BatchNorm and dropout explain nothing.
    """

    def __init__(self, reference, ranks, tolerance: float, resumed: bool = False, same_parts: bool = False):
        self.reference, self.ranks, self.tolerance = reference, ranks, tolerance
        self.resumed, self.same_parts = resumed, same_parts or resumed or not tolerance
        self.rounding = ROUNDING if tolerance else 0.0

    def first_difference(self) -> Finding | None:
        return next(self._findings(), None)

    def _findings(self) -> Iterator[Finding]:
        expected, steps, *others = (
            [step["step"] for step in record["steps"]] for record in (self.reference[0], *self.ranks)
        )
        for rank, record in enumerate(self.ranks[1:], 1):
            if others[rank - 1] != steps:
                what = f"rank {rank} made {len(record['steps'])} steps, and rank 0 {len(steps)}"
                yield Finding(None, "steps", what, cause("other_course"))
        for place, number in enumerate(steps):
            if number in expected:
                at = expected.index(number)
                yield from self._step([r["steps"][at] for r in self.reference], [r["steps"][place] for r in self.ranks])
            yield from self._tests(number)
        yield from differs_in_files(self.ranks[0])
        expected = expected[RESUMED_AFTER:] if self.resumed else expected
        if steps != expected:
            what = f"{len(steps)} steps were made instead of {len(expected)}"
            yield Finding(steps[-1], "steps", what, cause("other_course"))

    def _step(self, expected: list[dict], found: list[dict]) -> Iterator[Finding]:
        step = found[0]["step"]
        samples, base = (Samples([part for rank in ranks for part in rank["samples"]]) for ranks in (found, expected))
        for rank in found:
            if rank["optimizer_calls"] != expected[0]["optimizer_calls"]:
                what = f"{rank['optimizer_calls']} instead of {expected[0]['optimizer_calls']}"
                yield Finding(step, "calls of optimizer.step", what, cause("optimizer_calls"))
        why, must_differ = self._why_values(samples.other_inputs(base))
        yield from self._samples(step, "", samples, base, cause("samples"), why, must_differ)
        for kind, stage in (("gradients", "gradients"), ("at_step", "gradients at the step")):
            ranks = [rank[kind] for rank in found]
            yield from self._gradients(expected[0], ranks, stage, found[0]["step_samples"], why, must_differ)
        yield from self._learning_rates(expected[0], found)
        for kind in ("weights", "optimizer"):
            for rank, record in enumerate(found):
                yield from self._tensors(expected[0], record, kind, rank)

    def _samples(self, step, test, samples, base, why_samples, why_values, must_differ=False) -> Iterator[Finding]:
        """test: "test " for samples of a test, else ""."""
        if samples.count != base.count:
            yield Finding(step, f"{test}samples", samples.other_items(base), why_samples)
        for item, digests in samples.digests.items():
            if digests != base.digests.get(item):
                yield Finding(step, f"{test}items", f"item {item} has another content", cause("items"))
        for metric in sorted(samples.values.keys() ^ base.values.keys()):
            what = f"{metric} is counted in one of the runs only"
            yield Finding(step, f"{test}values", what, cause("other_course"))
        if what := samples.other_value(base, self.tolerance):
            yield Finding(step, f"{test}values", what, why_values, must_differ)

    def _why_values(self, other_inputs: bool) -> tuple[str, bool]:
        """Why values or gradients differ while samples, items and weights are the same, and whether they must."""
        if self.resumed:
            return cause("not_restored"), False
        if not self.same_parts and not other_inputs:
            modules = self.reference[0]["modules"]
            for kind, words in (("batch_norm", ["BatchNorm"]), ("dropout", ["Dropout", "DropPath", "StochasticDepth"])):
                names = [name for name in modules if any(word in name for word in words)]
                if names:
                    return cause(kind, names[0]), True
        return cause("across_samples"), False

    def _gradients(self, base, ranks, stage, step_samples, why, must_differ) -> Iterator[Finding]:
        step, is_complete = base["step"], stage == "gradients"
        expected = base["gradients" if is_complete else "at_step"]
        for found in ranks:
            for name in sorted(found.keys() ^ expected.keys()):
                yield Finding(step, stage, f"{name} has a gradient in one of the runs only", cause("unused"))
        limit = self.rounding * largest_norm(expected)
        apart = {}
        for rank, found in enumerate(ranks[1:], 1):
            for name, tensor in found.items():
                if not float(tensor[0]) <= limit and relative(ranks[0][name], tensor) > APART:
                    apart.setdefault(name, rank)
        if apart:
            names = list(apart)
            what = f"{names[0]} differs between ranks 0 and {apart[names[0]]}{and_others(names)}"
            yield Finding(step, stage, what, cause("not_reduced"))
        for found in ranks:
            factors = {}
            for name, tensor in expected.items():
                is_zero = float(tensor[0]) <= limit and float(found[name][0]) <= limit  # up to rounding
                if not is_zero and relative(tensor, found[name]) > self.tolerance:
                    factors[name] = self._factor(tensor, found[name])
            if factors:
                yield self._wrong_gradients(step, stage, factors, found, step_samples, why, must_differ)

    def _factor(self, expected, found) -> float:
        """What `expected` is multiplied by in `found`; NaN if it is not a multiple."""
        factor = float((expected[1:] @ found[1:]) / (expected[1:] @ expected[1:]))
        return factor if relative(factor * expected, found) < max(1e-3, self.tolerance) else math.nan

    def _wrong_gradients(self, step, stage, factors, found, step_samples, why, must_differ) -> Finding:
        names = list(factors)
        which = names[0] + and_others(names)
        if stage != "gradients":
            return Finding(step, stage, which, cause("at_step"))
        is_tail = step_samples < max(each["step_samples"] for each in self.reference[0]["steps"])
        first = factors[names[0]]
        if all(math.isclose(factor, first, rel_tol=1e-2) for factor in factors.values()):  # NaN is close to nothing
            what = f"{which}: {first:.4g} times what it should be"
            return Finding(step, stage, what, cause("tail" if is_tail else "factor"))
        if any(bool(found[name].isnan().any()) for name in names):
            return Finding(step, stage, f"{which} is NaN", cause("nan"))
        what = f"{which}: not a multiple of what it should be"
        if must_differ:
            return Finding(step, stage, what, why, expected=True)
        return Finding(step, stage, what, cause("tail" if is_tail else "gradients"))

    def _learning_rates(self, base: dict, found: list[dict]) -> Iterator[Finding]:
        for rank, record in enumerate(found):
            for name, wanted in base["learning_rates"].items():
                rate = record["learning_rates"].get(name, math.nan)
                if not abs(rate - wanted) <= 1e-9 * abs(wanted):
                    what = f"{name} is {rate:.6g} on rank {rank} instead of {wanted:.6g}"
                    why = cause("schedule_not_saved" if self.resumed else "schedule")
                    yield Finding(base["step"], "learning rate", what, why)

    def _tensors(self, base: dict, found: dict, kind: str, rank: int) -> Iterator[Finding]:
        """Weights or optimizer state; entries whose gradient is zero up to rounding do not count."""
        gradients = {name.partition(": ")[2]: tensor for name, tensor in found["gradients"].items()}
        limit = self.rounding * largest_norm(gradients)
        for name in sorted(base[kind].keys() ^ found[kind].keys()):
            yield Finding(base["step"], kind, f"{name} is in one of the runs only", cause("not_restored"))
        for name, tensor in base[kind].items():
            difference = relative(tensor, found[kind][name])
            if name.endswith(COUNTERS) or difference <= self.tolerance:
                continue
            gradient = gradients.get(name.partition(": ")[2].partition("/")[0])
            if self.tolerance and gradient is not None and gradient.shape == tensor.shape:
                counts = gradient.abs() > 1e-3 * gradient[1:].abs().max()
                counts[0] = False
                if float(gradient[0]) <= limit or relative(tensor[counts], found[kind][name][counts]) <= self.tolerance:
                    continue
            why = "statistics" if "running_" in name else "not_restored" if self.resumed else kind
            on = f" on rank {rank}" if rank else ""
            what = f"{name} differs{on} by {difference:.1e} of its largest entry"
            yield Finding(base["step"], kind, what, cause(why))

    def _tests(self, step: int) -> Iterator[Finding]:
        expected, *found = (
            [test for test in record["tests"] if test["step"] == step] for record in (self.reference[0], *self.ranks)
        )
        for rank, tests in enumerate(found):
            if [len(test["passes"]) for test in tests] != [len(test["passes"]) for test in expected]:
                what = f"rank {rank} has {plural(len(tests), 'test')} instead of {len(expected)} after step {step}"
                yield Finding(None, "tests", what, cause("other_course"))
        for number, test in enumerate(expected):
            for place, of_reference in enumerate(test["passes"]):  # one for each model, if several are tested
                samples = Samples([part for tests in found for part in tests[number]["passes"][place]])
                for item, times in samples.count.items():
                    if times != 1:
                        what = f"test item {item} counts {times} times"
                        yield Finding(None, "test samples", what, cause("test_samples"))
                causes = (cause("test_samples"), cause("test_values"))
                yield from self._samples(None, "test ", samples, Samples(of_reference), *causes)
            for rank, tests in enumerate(found):
                for metric, wanted in test["result"].items():
                    got = tests[number]["result"].get(metric, math.nan)
                    is_same = math.isnan(wanted) if math.isnan(got) else got == wanted
                    if not is_same and not abs(got - wanted) <= self.tolerance * max(abs(wanted), 1e-6):
                        what = f"{metric} is {got:.6g} on rank {rank} instead of {wanted:.6g}"
                        yield Finding(None, "test result", what, cause("mean_of_means"))


def largest_norm(gradients: dict) -> float:
    return max((float(tensor[0]) for tensor in gradients.values() if tensor[0].isfinite()), default=0.0)


def and_others(names) -> str:
    return f" and {plural(len(names) - 1, 'other')}" if len(names) > 1 else ""


def differs_in_files(record: dict) -> Iterator[Finding]:
    """Whether the files of a run's end hold what it had after its last step, bit for bit."""
    last = record["steps"][-1]

    def wrong(what: str) -> Finding:
        return Finding(None, "checkpoint", what, cause("checkpoint"))

    if names := record["unsaved"]:
        yield wrong(f"{names[0]}{and_others(names)}: trained, and not in the models given to run.start")
    checkpoint = f"checkpoints/step_{last['step']:08d}/"
    for kind, folder in (("weights", ""), ("weights", checkpoint), ("optimizer", checkpoint)):
        for name, tensor in last[kind].items():
            owner, _, key = name.partition(": ")
            file = f"{folder}{owner}.safetensors"
            held = record["files"].get(file)
            if held is None:
                yield wrong(f"there is no {file}")
                continue
            if not folder and key not in held:
                key = key.removeprefix("module.")  # a moving average: the file is of its model
            if key not in held:
                yield wrong(f"{file} has no {key}")
            elif difference := relative(tensor[1:], held[key][1:]):
                yield wrong(
                    f"{key} in {file} differs by {difference:.1e} of its largest entry from what the last step left"
                )


def largest_difference(reference: list[dict], ranks: list[dict]) -> float:
    """The largest relative difference of a gradient or a weight, over all steps and ranks."""
    known = {step["step"]: step for step in reference[0]["steps"]}
    largest = 0.0
    for step in (step for rank in ranks for step in rank["steps"]):
        for kind in ("gradients", "weights"):
            for name, tensor in known[step["step"]][kind].items():
                if name in step[kind] and not name.endswith(COUNTERS) and tensor.numel() > 1:
                    largest = max(largest, relative(tensor, step[kind][name]))
    return largest
