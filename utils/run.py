"""The bookkeeping of a training run: which step, what to log, when to save, when to stop, how to resume.

Forward, loss, backward, clipping and the optimizer's step stay in the script; nothing here calls them.
"""

import argparse
import atexit
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from .agree import on_main, same_on_all, same_result
from .atomic_files import fsync, write_json
from .banner import code_digests, print_banner
from .best import Best, is_number, to_python
from .checkpoint import Checkpoints, save_model
from .console import plural, show, stop
from .failures.processes import end_process_group, was_restarted
from .failures.signals import StopSignal
from .flags import MAY_CHANGE, with_defaults
from .loader import Batch, GlobalLoader, describe_data
from .metrics import Metrics
from .parallel import same_state
from .progress import Progress, peak_memory_gib
from .randomness import Purpose, combine, device_generators, seed_generators
from .run_folder import RunFolder


def resume_facts(args: argparse.Namespace, loaders: dict[str, GlobalLoader], data: dict) -> dict:
    """What must be the same when resuming, by kind: all flags and facts of the data but MAY_CHANGE, and the loaders.

    Flags of the script that may change, too, are named in `args.may_change`.
    """
    flags = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE.union(args.may_change)}
    data = {name: value for name, value in data.items() if name not in MAY_CHANGE}
    settings = {f"{name}_loader": loader.settings() for name, loader in loaders.items() if loader.seed is not None}
    return {"flags": flags, "data": data, **settings}


class Run:
    """One training run in one folder; a process may have several, one after the other. Collective.

    scripts/mnist_mlp.py shows how to use it.

    Args:
        args: the parsed flags; missing run flags get their defaults. When resuming, each must have the same value,
            except for MAY_CHANGE of flags.py, and the flags named in `args.may_change`.

    Attributes:
        step: optimizer steps done.
        summary: values of your own for summary.json.
        speeds: further speeds for the log lines on the screen, as amounts per sample: {"tokens/s": 256}.
    """

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace):
        atexit.unregister(end_process_group)
        self.accelerator, self.args = accelerator, with_defaults(args)
        self.args.resume |= was_restarted()  # nobody is there to type --resume
        self.stop_signal = StopSignal(accelerator)
        self.devices = device_generators(accelerator)
        self.best = Best(self.args.save_best, self.args.patience)
        self.folder = RunFolder(accelerator, Path(args.output_dir), self.args.resume)
        self.step, self.summary, self.speeds = 0, {}, {}
        self.stopped_early, self.is_first_step = False, True
        self.last_test, self.test_batch = {}, 0
        self.completed = None

    def start(
        self,
        train_loader: GlobalLoader,
        test_loader: GlobalLoader | None,
        total_steps: int,
        *,
        checkpoint: dict,
        data: dict | None = None,
        model_parts=None,
    ) -> None:
        """Load the newest checkpoint (with --resume), print the banner, open the log files. Collective.

        If the run is already complete, it says so; `epochs` and `batches` then yield nothing, and nothing is logged.

        Args:
            total_steps: optimizer steps of the whole run.
            checkpoint: everything a checkpoint must hold, by name, as `prepare` returned it: models, optimizers,
                schedulers, moving averages, and any other object with state_dict and load_state_dict. None under a
                name: an optimizer or scheduler is left out on purpose.
            data: further facts about the data, which must be the same on all processes and when resuming, for run.json
                and the banner; a "fingerprint" replaces the loaders'.
            model_parts: a parallel.pipeline.ModelParts, if the processes share the model.
        """
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps must be a positive int, got {total_steps!r}")
        accelerator, args = self.accelerator, self.args
        self.total_steps, self.steps_per_epoch = total_steps, len(train_loader)
        self.samples_per_epoch = train_loader.num_samples
        is_meant = any(part is None for part in checkpoint.values())
        checkpoint = {name: part for name, part in checkpoint.items() if part is not None}
        self.batch_size, self.state, self.model_parts = train_loader.sampler.batch_size, checkpoint, model_parts
        self.train_loader = train_loader
        models = [part for part in checkpoint.values() if isinstance(part, nn.Module)]
        loaders, accelerator.loaders = accelerator.loaders, None  # a later one would not be compared when resuming
        data = same_on_all(describe_data(loaders) | (data or {}))
        facts = resume_facts(args, loaders, data) | {"total_steps": total_steps}
        path = self.folder.path
        self.checkpoints = Checkpoints(accelerator, path / "checkpoints", checkpoint, facts, args.keep_checkpoints)
        self.step, self.run_state = self.checkpoints.load()
        self.best.load_state(self.run_state)
        self.unsaved = [] if model_parts else same_state.check_prepared(accelerator, self.checkpoints, is_meant)
        self._warn_of_changes()
        self.metrics = Metrics(accelerator, self.run_state.get("metrics"))
        topology = print_banner(accelerator, train_loader, total_steps, data, path, model_parts)
        summary = on_main(accelerator, lambda: self.folder.read_summary(self.step))
        if summary and (self.step == total_steps or summary["stopped_early"]):
            self.completed = summary
            done = "the run is done" if self.step == total_steps else "the run stopped early"
            return accelerator.print(f"{done}, after {plural(self.step, 'step')}: nothing to do")
        self._attach(models)
        self.progress = Progress(self.step, total_steps, shows=accelerator.is_main_process)
        about = {"arguments": vars(args), "data": data, "total_steps": total_steps}
        metrics_bytes = self.run_state.get("metrics_bytes", 0)
        on_main(accelerator, lambda: self.folder.open(self.step, metrics_bytes, about, topology))

    def _warn_of_changes(self) -> None:
        """Warn if a resumed run will not be what the checkpoint's run would have been."""
        num_slots, self.code = self.train_loader.sampler.num_slots, code_digests()
        before, code = self.run_state.get("num_slots", num_slots), self.run_state.get("code", self.code)
        if before != num_slots and self.accelerator.is_main_process:
            show(
                f"warning: a step had {plural(before, 'micro-batch')} and now has {num_slots}: random numbers in the "
                "model, such as dropout, and BatchNorm go on with other values; not with --virtual_processes"
            )
        changed = sorted(name for name in code | self.code if code.get(name) != self.code.get(name))
        if changed and self.accelerator.is_main_process:
            show(f"warning: changed since the checkpoint was saved: {', '.join(changed)}")

    def _warn_of_unsaved(self) -> None:
        """Warn once if a resumed run would begin anew with an optimizer that has a state, or a schedule."""
        names = [type(part).__name__ for part in self.unsaved if getattr(part, "state", True)]
        self.unsaved = []
        if names and self.accelerator.is_main_process:
            show(
                f"warning: run.start(checkpoint=...) lacks {', '.join(names)} from accelerator.prepare: a resumed run "
                'would begin anew with it; if you mean that, give None under its name: {..., "optimizer": None}'
            )

    def _attach(self, models: list[nn.Module]) -> None:
        """Attach the checks and the trackers that this run needs. Collective."""
        accelerator, args, sampler = self.accelerator, self.args, self.train_loader.sampler
        layers = [layer for model in models for layer in model.modules() if isinstance(layer, _BatchNorm)]
        if sampler.batch_size % sampler.num_slots and any(layer.training for layer in layers):
            stop(
                f"--batch_size {sampler.batch_size} is not divisible by {sampler.num_slots} micro-batches, and the "
                "model has BatchNorm, which needs micro-batches of equal size"
            )
        self.warned = set()
        is_compared = self.model_parts is None and sampler.accumulation > 1
        generators = [torch.default_generator, *self.devices]
        self.step_rule = same_state.StepRule(accelerator, self.checkpoints, is_compared, generators)
        if accelerator.layout.virtual_processes:
            from .parallel.virtual_processes import sum_gradients_by_tree

            sum_gradients_by_tree(accelerator, models, self.checkpoints.optimizers.values())
        if accelerator.log_with:
            config = {name: v for name, v in vars(args).items() if isinstance(v, (int, float, str))}
            accelerator.init_trackers("run", config=config)

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs, until `total_steps` steps are done or --patience ends the run.

        A run resumed at the end of an epoch begins with that epoch's test. Reseeds torch, Python and NumPy at the start
        of each epoch and after each test, so random numbers drawn there are the same on every rank and after resuming.
        """
        if self.completed:
            return
        first = max(self.step - 1, 0) // self.steps_per_epoch
        for epoch in range(first, math.ceil(self.total_steps / self.steps_per_epoch)):
            seed_generators(combine(self.args.seed, epoch, Purpose.EPOCH), self.devices)
            yield epoch
            self.stopped_early = self.step < self.total_steps and self.best.is_stuck(self.accelerator.is_main_process)
            if self.stopped_early:
                self._save()
                return

    def batches(self, loader: GlobalLoader, epoch: int) -> Iterator[Batch]:
        """Yield the remaining micro-batches of an epoch; between steps, log, save and stop. Collective.

        A step ends when the next batch is requested, so do not `break` out of the loop. Each one is `seeded`.
        """
        for step in self._steps(loader, epoch, is_free=False):
            for batch in self.seeded(step):
                yield batch
                self._check_accumulation(batch.micro_step + 1 == loader.sampler.accumulation)

    def steps(self, loader: GlobalLoader, epoch: int) -> Iterator[list[Batch]]:
        """As `batches`, but yield all micro-batches of a step as a list, for phases of your own. Collective.

        A phase in which the model runs is a loop over `seeded(batches)`.
        """
        for step in self._steps(loader, epoch, is_free=True):
            step = list(step)
            self._seed_model(step[0])
            self.step_rule.leave()
            yield step
            self._check_accumulation(is_last=True)

    def _steps(self, loader: GlobalLoader, epoch: int, is_free: bool) -> Iterator[Iterator[Batch]]:
        """Yield an iterator over the micro-batches of each remaining step of an epoch. Collective.

        is_free: see StepRule.
        """
        if self.completed:
            return
        self.is_free = is_free
        batches = self.progress.timed(loader.epoch(epoch, self.step - epoch * self.steps_per_epoch))
        for first in batches:
            self.rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in self.checkpoints.optimizers.values()]
            yield itertools.chain([first], itertools.islice(batches, loader.sampler.accumulation - 1))
            self._step_done(epoch)
            if self.step == self.total_steps:
                break
        seed_generators(combine(self.args.seed, epoch, Purpose.AFTER_EPOCH), self.devices)

    def seeded(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches of a step; before each, seed torch, Python and NumPy by its position in the run.

        So dropout in a model or mixup in the loop is the same when resumed, the same on P processes as on one process
        with P accumulation steps, and the same in each phase over one step.
        """
        is_watched = self.test_batch == 0 and self.accelerator.layout.num_slots > 1
        for number, batch in enumerate(batches, 1):
            self._seed_model(batch)
            if is_watched:
                self.step_rule.begin(batch, number == 1, self.is_free)
            yield batch
            if is_watched:
                self.step_rule.end(number == self.train_loader.sampler.accumulation)

    def _check_accumulation(self, is_last: bool) -> None:
        if self.accelerator.sync_gradients != is_last:
            raise RuntimeError(
                "gradient accumulation is out of step with the batches: put forward, backward and the optimizer's step "
                "into one `with accelerator.accumulate(model):` per batch, with all models in one call"
            )

    def _seed_model(self, batch: Batch) -> None:
        self.accelerator.steps_done = self.step
        self.accelerator.micro_batches += 1
        seed_generators(combine(self.args.seed, self.step, batch.slot, self.test_batch), self.devices)

    def _step_done(self, epoch: int) -> None:
        """Count a step; then log, save and stop if due. Collective."""
        if self.is_first_step:
            self._check_weights()
            self.is_first_step = self.step_rule.is_compared = False
        samples_before = self.step % self.steps_per_epoch * self.batch_size
        self.step += 1
        self.progress.samples += min(self.batch_size, self.samples_per_epoch - samples_before)
        args = self.args
        epoch_ends = self.step % self.steps_per_epoch == 0 or self.step == self.total_steps
        if self.step % args.log_every == 0 or epoch_ends:
            means = self.metrics.reduce()  # stops if a loss is not finite, with its samples
            self.accelerator.check_norms()
            del means["samples"]
            names = ["lr"] if len(self.rates) == 1 else [f"{name}_lr" for name in self.checkpoints.optimizers]
            rates = dict(zip(names, self.rates, strict=True))
            self.log("train", epoch, **means, **rates, **self.progress.since_last_line())
        # A run resumed at the end of an epoch begins with the test, so even a checkpoint saved after that test must
        # not hold its result.
        self.run_state = {"metrics_bytes": self.folder.metrics_bytes(), **self.best.state()}
        due = self.step % args.checkpoint_every == 0 if args.checkpoint_every else epoch_ends
        if due or self.step == self.total_steps:
            self._save()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """After a signal, or if a checkpoint could not be written: save and exit. Collective."""
        if self.stop_signal.agreed(self.checkpoints.failed()):
            self._save()
            self.checkpoints.wait()
            self.stop_signal.leave(self.step)

    def _check_weights(self) -> None:
        if self.accelerator.num_processes > 1 and self.model_parts is None:
            models = {name: self.state[name] for name in self.checkpoints.models}
            same_state.check(self.accelerator, models, self.warned, self.is_first_step)

    def _save(self) -> None:
        state = {"metrics": self.metrics.state()}  # stops at a loss that is nan
        self.accelerator.check_norms()
        self._check_weights()
        self._warn_of_unsaved()
        state |= {"num_slots": self.train_loader.sampler.num_slots, "code": self.code}
        self.checkpoints.save(self.step, {**self.run_state, **state}, lambda: fsync(self.folder.metrics_path))

    def log_train(self, batch: Batch, *, weights: torch.Tensor | None = None, **values: torch.Tensor) -> None:
        """Add a micro-batch to the means of the next log line: `run.log_train(batch, loss=losses, error_px=errors)`.

        Args:
            values: (n,), one per sample; each metric is the mean over the micro-batches that have it.
            weights: (n,); None: losses have the batch's weights, and in other metrics all samples count equally.
        """
        self.metrics.add(batch, weights=weights, step=self.step + 1, **values)

    def log(self, split: str, epoch: int, **metrics: float) -> None:
        """Write a line of your own to metrics.jsonl, the screen and the trackers.

        Args:
            split: the first word of the line.
            epoch: counted from 0.
        """
        if self.completed:
            return
        metrics = {name: number for name, value in metrics.items() if is_number(number := to_python(value))}
        self.accelerator.log({f"{split}/{name}": value for name, value in metrics.items()}, self.step)
        if self.accelerator.is_main_process:
            self.folder.write_metrics({"split": split, "step": self.step, "epoch": epoch + 1, **metrics})
            self.progress.show_line(split, self.step, epoch + 1, metrics, self.speeds)

    def test_batches(self, loader: GlobalLoader) -> Iterator[Batch]:
        """Yield the batches of a test set; after a signal, stop the run. Collective."""
        for batches in self.test_steps(loader):
            yield from self.seeded(batches)

    def test_steps(self, loader: GlobalLoader) -> Iterator[list[Batch]]:
        """As `test_batches`, but yield lists of the loader's `accumulation` micro-batches. Collective."""
        windows = zip(*[loader.epoch()] * loader.sampler.accumulation, strict=True)
        try:
            for self.test_batch, window in enumerate(windows, 1):  # 0 during training
                yield [*window]
                self._stop_if_asked()
        finally:  # also after a break
            self.test_batch = 0
        seed_generators(combine(self.args.seed, self.step, Purpose.AFTER_TEST), self.devices)

    def new_metrics(self) -> Metrics:
        """Metrics for a test: `add` each batch, then `reduce`."""
        return Metrics(self.accelerator, test_after=self.step)

    def log_test(self, result: dict) -> None:
        """Log a test result, which must be the same on every rank: rank 0's counts. Collective.

        The best loss is remembered; with --save_best, the best METRIC and the model that reached it.

        Args:
            result: values by name. Numbers are logged; arrays and lists go to summary.json only.
        """
        if self.completed:
            return
        self.last_test = {name: to_python(value) for name, value in result.items()}
        numbers = same_result({name: value for name, value in self.last_test.items() if is_number(value)})
        if self.best.add(numbers, self.step) and self.args.save_best:
            self._save_models("_best")
        self.log("test", math.ceil(self.step / self.steps_per_epoch) - 1, **numbers)

    def _save_models(self, suffix: str = "") -> None:
        for name in self.checkpoints.models:
            model = self.state[name]
            model = model.module if isinstance(model, AveragedModel) else model
            save_model(self.accelerator, model, self.folder.path / f"{name}{suffix}.safetensors")

    def finish(self) -> dict:
        """Save every model as <name>.safetensors; write summary.json. Collective.

        The generators are seeded, so what a later run in this process draws is the same when resumed.

        Returns:
            The content of summary.json; also if the run was already complete.
        """
        if not self.completed and not self.stopped_early and self.step < self.total_steps:
            sentence = f"the run ends at step {self.step} of {self.total_steps}: loop over run.epochs and run.batches"
            if not self.step:
                stop(sentence)
            self.accelerator.print(f"warning: {sentence}")
        seed_generators(combine(self.args.seed, self.total_steps, Purpose.AFTER_RUN), self.devices)
        atexit.register(end_process_group)  # not after an error: NCCL would wait for the other ranks
        self.accelerator.loaders = {}  # a later run has its own
        self.accelerator.micro_batches = 0  # what follows may take long
        if self.completed:
            return self.completed
        self.checkpoints.wait()
        self._save_models()
        summary = {
            "step": self.step,
            **{f"test_{name}": value for name, value in self.last_test.items()},
            **self.best.summary(),
            **{name: to_python(value) for name, value in self.summary.items()},
            "peak_memory_gib": round(peak_memory_gib(self.accelerator), 3),
            "stopped_early": self.stopped_early,
            "checkpoint_time_s": round(self.checkpoints.save_time_s, 4),
            **self.progress.summary(self.step),
        }
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers = []

        def write() -> dict:
            write_json(self.folder.summary_path, summary)
            self.progress.say_done(self.step, self.last_test, self.folder.path)
            return summary

        return on_main(self.accelerator, write)
