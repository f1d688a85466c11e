"""Findings from the record of one process alone."""

import collections
import itertools

import torch

from ..records import Loader, Record, Step
from ..tensors import norm_of
from ..text import and_join, plural
from . import Finding, Findings, Note, close, epochs_of, first_line, is_look, named, passes_of, trained_on

OF_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


def cannot_judge(record: Record) -> str | None:
    """Why prove cannot judge this script; None if it can."""
    facts, steps = record.facts, record.steps
    if reason := facts.cannot_tell:
        return reason
    if (line := facts.sharded) and torch.__version__ < (2, 9, 99):
        return f"torch {torch.__version__} adds FSDP's gradients up over gloo, where it should average them ({line})"
    if line := facts.local_sgd:
        return f"LocalSGD lets the processes train alone for some steps, on purpose ({line})"
    if line := facts.averages_weights:
        return f"it averages or exchanges the weights after its steps, and not only the gradients before ({line})"
    if lines := facts.layers:
        return f"its layers are divided over the processes, and not only its samples ({lines[0]})"
    if "LBFGS" in facts.optimizers:
        return "LBFGS computes the loss several times in a step: there is no one gradient to compare"
    if not steps and facts.waiting > 1:
        read = max((each.batches for each in record.passes if each.in_training), default=facts.waiting)
        message = f"no step after {plural(facts.waiting, 'backward pass')}, {plural(read, 'micro-batch')} per epoch"
        return f"{message}, which is all that prove reads: let the script accumulate fewer"
    if not steps:
        printed = record.printed
        return "it ended before the first optimizer.step()" + f'; it printed last: "{printed}"' * bool(printed)
    if not any(step.micro_batches for step in steps):
        return "no backward pass came before an optimizer.step()"
    is_zero = any(step.at_step for step in steps) and not any(map(_has_gradient, steps))
    if is_zero and total_weight(record, steps[0]) is None and not any(step.zeroed for step in steps):
        return "every gradient is zero, as where all rewards are the same"
    return None


def findings(record: Record) -> Findings:
    yield from _untrained(record)
    yield from _order(record)
    for number, step in enumerate(record.steps, 1):
        for find in OF_A_STEP:
            yield from find(record, number, step)
    yield from _schedule(record)
    yield from _saves(record)
    yield from _evaluations(record)
    yield from _modes(record)
    if usual_micro_batches(record) > 1 and (name := changing_buffer(record)):
        message = f"each forward pass changes the buffer {name}: with accumulation, it changes in each micro-batch"
        yield Note("gradient", message, None, first_line(record.steps[0]))
    yield from loaded(record)
    facts = record.facts
    if facts.run and facts.is_complete and not facts.is_finished:
        yield Finding("finish", "files", "run.finish() is not called: no model is saved", None, facts.run)


def loaded(record: Record) -> Findings:
    """A model that has taken nothing of what it was given."""
    if line := record.facts.loads_nothing:
        message = f"load_state_dict with strict=False takes nothing: all names differ, as that of {record.facts.lost}"
        yield Finding("loads_nothing", "checkpoint", message, None, line)


def usual_micro_batches(record: Record) -> int:
    """The number of micro-batches of most steps within an epoch."""
    within = [step for step in record.steps if len(epochs_of(step)) < 2]
    counts = collections.Counter(len(step.micro_batches) for step in within or record.steps)
    return max(counts, key=lambda count: (counts[count], count), default=1)


def weights(record: Record, step: Step) -> list[tuple[float, int, str]] | None:
    """For each micro-batch: the coefficient of the mean of its losses in the gradient, the number of losses, the line.

    None where a micro-batch has no known loss, or several.
    """
    found = [micro.losses for micro in step.micro_batches]
    if len(record.facts.optimizers) != 1 or not found or any(len(losses) != 1 for losses in found):
        return None
    return [losses[0] for losses in found]


def total_weight(record: Record, step: Step) -> float | None:
    """The coefficient of the mean of a step's losses in the gradient; None where it is not known."""
    found = weights(record, step)
    return None if found is None else sum(weight for weight, _, _ in found)


def _untrained(record: Record) -> Findings:
    """Gradients that are lost, or never reach the optimizer."""
    steps, facts = record.steps, record.facts
    if len(facts.optimizers) == 1:
        for number, step in enumerate(steps, 1):
            micro_batches = step.micro_batches
            for done, line in step.zeroed:
                message = f"zero_grad after {done} of {plural(len(micro_batches), 'micro-batch')}: gradients are lost"
                has_new_samples = all(micro.samples for micro in micro_batches)  # else a second look at one batch
                if done < len(micro_batches) and has_new_samples and facts.loaders:
                    yield Finding("zeroed", "gradient", message, number, line)
                    return
                if done == len(micro_batches) and not _has_gradient(step):
                    yield Finding("zeroed", "gradient", f"{message} before the step", number, line)
                    return
    if not any(map(_has_gradient, steps)):
        message = "no parameter of the optimizer has a gradient: the model that is called has others, and never changes"
        if any(step.at_step for step in steps):
            message = "all gradients are zero: the model never changes"
        yield Finding("untrained", "weights", message, 1, steps[0].line)
    elif facts.untrained:
        message = f"{named(facts.untrained)}: a gradient, and in no optimizer"
        yield Note("weights", message, 1, steps[0].line)


def _has_gradient(step: Step) -> bool:
    return any(norm_of(gradient) for gradient in step.at_step.values())


def _modes(record: Record) -> Findings:
    """A model that stays in evaluation mode, as after a test."""
    modes = collections.defaultdict(list)
    for number, step in enumerate(record.steps, 1):
        for model, is_training in step.modes.items():
            modes[model].append((is_training, number, step.line))
    for known in modes.values():
        trained = [each for each in known if each[0]]
        if trained and trained[-1] != known[-1]:
            _, number, line = known[known.index(trained[-1]) + 1]
            message = "from here on the model trains in evaluation mode: model.train() is missing"
            yield Finding("train_mode", "evaluation", message, number, line)
            return


def _evaluations(record: Record) -> Findings:
    trained, loaders = trained_on(record), record.facts.loaders
    for key, loader in loaders.items():
        is_tested = key not in trained and any(key in test.samples for test in record.evaluations)
        if is_tested and loader.drop_last and (loader.length or 0) % (loader.given or 1):
            yield Note("evaluation", "drop_last leaves out the last samples of the test data", None, loader.line)
    for test in record.evaluations:
        samples = {key: digests for key, digests in test.samples.items() if key not in trained}
        tested = sum(
            min(len(each), (loaders[key].items if key in loaders else None) or len(each))
            for key, each in samples.items()
        )
        if test.in_training and tested:
            message = "the model is tested in training mode"
            yield Finding("eval_mode", "evaluation", message, None, test.in_training)
        if (counted := test.result.get("samples", 0)) > tested > 0:
            message = f"the result is of {counted:.0f} samples, and the test has {tested}"
            yield Finding("eval_repeated", "evaluation", message, None, test.line)


def _order(record: Record) -> Findings:
    passes, message = passes_of(record), "each epoch has the same order"
    if record.facts.ignores_index:  # the same by the seeds that prove gives
        return
    for (key, number), samples in passes.items():
        before = passes.get((key, number - 1))
        if before is None or samples != before[: len(samples)] or len(set(samples)) < 2 or is_look(before, samples):
            continue
        loader = record.facts.loaders.get(key, Loader(""))
        line = loader.line
        if loader.shuffles:
            kind = "set_epoch" if loader.sampler == "DistributedSampler" else "same_order"
            yield Finding(kind, "samples", message, None, line)
        else:
            yield Note("samples", f"the training data are not shuffled: {message}", None, line)


def _held(record: Record, number: int, step: Step) -> Findings:
    if step.holds and len(record.facts.optimizers) == 1:
        message = "the gradients of the step before are still there when the next one begins"
        yield Finding("zero_grad", "gradient", message, number, first_line(step))


def _two_epochs(record: Record, number: int, step: Step) -> Findings:
    epochs = epochs_of(step)
    if len({key for key, _ in epochs}) != 1 or len(epochs) == 1:
        return
    message = "has micro-batches of two epochs: those that were left at the end of one are added to the next"
    if len(step.micro_batches) <= window(record, number):  # by a counter that goes on
        yield Note("gradient", f"a step {message}", None, first_line(step))
    elif not fills_windows(record):
        yield Finding("leftover", "gradient", message, number, first_line(step))


def _scaled(_record: Record, number: int, step: Step) -> Findings:
    calls = [call for call in step.scaler if call != "scale twice"]
    if calls[:1] == ["clip"] and "step" in calls:
        message = "the gradients are still multiplied by GradScaler when they are clipped"
        yield Finding("clip_scaled", "clipping", message, number, step.clips[0][1])
    if "scale twice" in step.scaler:
        message = "a loss that GradScaler has scaled is scaled again, and its gradient unscaled once"
        yield Finding("scaled_twice", "loss weights", message, number, first_line(step))


def _too_early(record: Record, number: int, step: Step) -> Findings:
    """A step before all gradients are there."""
    if step.is_pending:
        message = "FSDP still has gradients that are not reduced when the optimizer steps"
        yield Finding("not_reduced", "gradient", message, number, step.line)
    if number == 1 and steps_too_early(record):
        message = f"the first step has 1 micro-batch, and the next one {usual_micro_batches(record)}: "
        message += "a step comes after the first micro-batch instead of the last"
        yield Finding("first_step", "gradient", message, number, step.line)


def _clipped(_record: Record, number: int, step: Step) -> Findings:
    if step.clips_nothing:
        message = "no parameter is clipped: what is passed has none, as a generator that was read before"
        yield Finding("clip_nothing", "clipping", message, number, step.clips_nothing)
    count = len(step.micro_batches)
    done, line = step.clips[0] if step.clips else (count, "")
    if done < count:
        yield Finding("clip_early", "clipping", f"clipped after {done} of {count} micro-batches", number, line)


def _divided(record: Record, number: int, step: Step) -> Findings:
    """The sum of the losses of a step's micro-batches must be divided once, by their number."""
    total, count, usual = total_weight(record, step), len(step.micro_batches), usual_micro_batches(record)
    if total is None:
        return
    if usual > 1 and count == usual and len(epochs_of(step)) <= 1:
        if close(total, usual):
            message = f"{usual} times what it should be: the mean over {usual} micro-batches is a sum"
            yield Finding("not_divided", "loss weights", message, number, first_line(step))
        elif close(total, 1 / usual):
            message = f"{1 / usual:.4g} times what it should be: divided by {usual} micro-batches twice"
            yield Finding("divided_twice", "loss weights", message, number, first_line(step))
    is_shorter = count < usual and not steps_too_early(record) and not fills_windows(record)
    if is_shorter and close(total, count / usual):
        message = f"{total:.4g} times what it should be: {plural(count, 'micro-batch')}, divided by {usual}"
        if who := "Accelerate" if record.facts.accelerate else record.facts.framework:
            yield Note("loss weights", f"the last step of an epoch is {message}, by {who}", number, first_line(step))
        else:
            yield Finding("last_step", "loss weights", message, number, first_line(step))


OF_A_STEP = (_held, _two_epochs, _scaled, _too_early, _clipped, _divided)


def fills_windows(record: Record) -> bool:
    """Whether an epoch of all data, which are cut, has no micro-batches that are left at its end."""
    for loader in (loader for key, loader in record.facts.loaders.items() if key in trained_on(record)):
        if loader.given and loader.length:
            batches = loader.length // loader.given if loader.drop_last else -(-loader.length // loader.given)
            return batches % usual_micro_batches(record) == 0
    return False


def changing_buffer(record: Record) -> str:
    """A buffer that each forward pass changes in training, other than those of BatchNorm."""
    for one, other in itertools.pairwise(record.steps[:2]):
        for name, value in one.buffers.items():
            if other.buffers.get(name) != value and not name.endswith(OF_BATCH_NORM):
                return name
    return ""


def window(record: Record, number: int) -> int:
    """The micro-batches of the next step within one epoch, else of the last one before; a window may grow meanwhile."""
    steps = record.steps
    for step in [*steps[number:], *reversed(steps[: number - 1])]:
        if len(epochs_of(step)) == 1:
            return len(step.micro_batches)
    return len(steps[0].micro_batches)


def steps_too_early(record: Record) -> bool:
    """Whether the optimizer steps after the first micro-batch of a window: number % accumulation == 0."""
    counts = [len(step.micro_batches) for step in record.steps[:2]]
    return len(record.facts.optimizers) == 1 and counts == [1, usual_micro_batches(record)] and counts[1] > 1


def _schedule(record: Record) -> Findings:
    steps, usual = record.steps, usual_micro_batches(record)
    per_step = {later.schedule_calls - step.schedule_calls for step, later in itertools.pairwise(steps[:4])}
    if usual > 1 and per_step == {usual} and len(record.facts.optimizers) == 1:
        message = f"the schedule steps {usual} times per step of the optimizer, once per micro-batch"
        if record.facts.is_exact:
            yield Finding("schedule", "learning rate", message, 1, steps[0].line)
        else:
            message += ": right only if its length is counted in micro-batches"
            yield Note("learning rate", message, 1, steps[0].line)


def _saves(record: Record) -> Findings:
    needed = {"optimizer": record.facts.has_state, "schedule": record.facts.schedules}
    for save in record.saves:
        message, taken = "", {kind for kind, after in record.facts.taken if after == save.after}
        if save.kind == "save_state":
            if save.lacks_schedule and "schedule" not in taken:  # else it is in a file of the script's own
                message = "save_state leaves the schedule out: it was not passed to accelerator.prepare"
        elif "model" in save.has and save.counters:
            has = save.has | taken
            lacks = [f"the {part}" for part, is_needed in needed.items() if is_needed and part not in has]
            if lacks:
                message = f"{save.path} has {', '.join(save.counters)}, and not {and_join(lacks)}"
        if message and record.facts.loads:
            yield Finding("checkpoint_lacks", "checkpoint", message, None, save.line)
        elif message:
            yield Note("checkpoint", f"{message}: the script cannot resume", None, save.line)
