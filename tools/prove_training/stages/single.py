"""What one process alone shows of a script."""

import collections
import itertools
from collections.abc import Iterator

from ..text import plural
from . import Finding, close, is_exact, note, parts_of, passes_of, trained_on


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
