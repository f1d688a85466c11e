"""Gradients and weights, step by step."""

import math
from collections.abc import Iterator

from ..tensors import differ
from . import APART, TOLERANCE, ZERO, Comparison, Finding, apart, close, named, note, samples_of, step_size, united
from .losses import Losses
from .rates import Rates
from .single import Single


class Steps(Comparison):
    """Each step, compared from the same weights."""

    def __init__(self, reference: dict, ranks: list[dict]):
        super().__init__(reference, ranks)
        self.losses, self.rates = Losses(reference, ranks), Rates(reference, ranks)
        self.compared = self.rates.compared  # one list
        # Virtual processes add up in the same order on any number of processes: bit for bit the same.
        self.tolerance = 0.0 if self.facts["virtual_processes"] else TOLERANCE

    def parts(self) -> int:
        """How many micro-batches a process makes of what is one on one process."""
        if not self.ranks[0]["steps"]:
            return 1
        return Single(self.ranks[0]).usual_micro_batches() // Single(self.reference).usual_micro_batches()

    def findings(self) -> Iterator[Finding]:
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
        if (ranks_differ := apart(steps, "gradients")) is not None:
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
        yield from self.losses.findings(number, steps)
        if (ranks_differ := apart(steps, "at_step")) is not None and not is_wrong:
            names, rank = ranks_differ
            what = f"{named(names)}: ranks 0 and {rank} have different gradients after clipping"
            yield Finding("clipped", "clipping", what, number, steps[0]["line"])
            return
        rates = list(self.rates.findings(number, wanted, steps))
        yield from rates
        if (ranks_differ := apart(steps, "weights")) is not None:
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
            parts = self.parts()
            kind = "factor"
            if parts > 1 and (close(first, 1 / parts) or close(first, parts)):
                kind = "divided_twice" if first < 1 else "not_divided"
        else:
            what = f"{named(names)}: not a multiple of what it is on 1 process"
            kind = "gradient"
        if self.losses.are_unequal(steps):
            if not is_last or self.is_exact:
                return  # said with the weights of the losses
            what = f"the last step of an epoch: {what}, a mean of means over unequal parts"
            yield note("gradient", what, number, line)
            return
        yield Finding(kind, "gradient", what, number, line)

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

    def statistics(self) -> Iterator[Finding]:
        """BatchNorm has the statistics of this process alone, and those of rank 0 are saved."""
        for number, steps in enumerate(zip(*(rank["steps"] for rank in self.ranks), strict=False), 1):
            if (ranks_differ := apart(steps, "statistics")) is not None:
                what = f"{named(ranks_differ[0])}: the running statistics are those of each process alone"
                if self.is_exact:
                    yield Finding("statistics", "BatchNorm", what, number, steps[0]["line"])
                else:
                    yield note("BatchNorm", f"{what}, and rank 0 saves its own", number, steps[0]["line"])
                return
        if self.is_exact and (ranks_differ := apart([rank for rank in self.ranks], "final")) is not None:
            names, rank = ranks_differ
            what = f"{named(names)}: ranks 0 and {rank} have different weights after the last step"
            yield Finding("weights", "weights", what, None, self.facts["run"])
