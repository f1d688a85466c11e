"""The bookkeeping of a training run: which step, what to log, when to save, when to stop, how to resume.

Forward, loss, backward, clipping and the optimizer's step stay in the script; nothing here calls them.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from .best import Best, is_number, plain
from .checkpoint import Checkpoints, save_model
from .console import plural, show, stop
from .extras import banner, hang_watchdog
from .extras.curves import plot_curves
from .extras.peak_memory import peak_memory_gib
from .flags import as_json
from .loader import Batch, GlobalLoader, describe_data
from .metrics import LINE, Metrics
from .progress import Progress, metric_text
from .randomness import combine, seed_generators_for
from .run_folder import RunFolder
from .sampler import GlobalSampler
from .signals import StopSignal
from .topology import same_on_all

DEFAULTS = {
    "seed": 0,
    "resume": False,
    "checkpoint_every": 0,
    "keep_checkpoints": 2,
    "save_best": None,
    "patience": 0,
    "log_every": 10,
    "log_with": None,
    "profile": 0,
}


class Run:
    """One training run in one folder. Collective.

        run = Run(accelerator, args)
        run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, "optimizer": optimizer})
        for epoch in run.epochs():
            for batch in run.batches(train_loader, epoch):
                ...
                run.log_train(batch, loss=losses)
            run.log_test(evaluate(...))
        run.finish()

    Args:
        args: `output_dir`, and those of DEFAULTS that your parser has (`ArgumentParser.add_run_flags` adds all of
            them); run.json records everything. A resumed run must have the same values for the flags that
            `args.resume_invariants` names: see ArgumentParser.

    Attributes:
        step: optimizer steps done, the one number that says where the run is.

    Raises:
        SystemExit: on every rank, if the folder holds a run and --resume is not given, if another process writes
            to it, or if it cannot be written to.
    """

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace):
        self.accelerator = accelerator
        self.args = argparse.Namespace(**{**DEFAULTS, **vars(args)})
        self.stop_signal = StopSignal(accelerator)
        self.folder = RunFolder(accelerator, Path(args.output_dir), self.args.resume)
        self.best = Best(self.args.save_best)
        self.step = 0
        self.before_test = None  # what a checkpoint has from before the test of this step
        self.stopped_early = False
        self.last_test = {}
        self.more_summary = {}

    def start(
        self,
        train_loader: GlobalLoader,
        test_loader: GlobalLoader | None,
        total_steps: int,
        *,
        checkpoint: dict,
        data: dict | None = None,
        resume_invariants: dict | None = None,
        model_parts=None,
    ) -> None:
        """Load the newest checkpoint (with --resume), print the banner, open the log files. Collective.

        Args:
            total_steps: optimizer steps of the whole run, an int.
            checkpoint: by name, everything that a checkpoint must hold, as `prepare` returned it: any number of
                models, optimizers, schedules, moving averages, and objects of your own with state_dict and
                load_state_dict.
            data: more about the data, for run.json and the screen; its "fingerprint" replaces the loaders' own.
            resume_invariants: what else a resumed run must have the same value for, by name.
            model_parts: a parallel.pipeline.ModelParts, if the processes share the model.

        Raises:
            SystemExit: on every rank, if processes have different data or the checkpoint does not fit; with exit
                code 0 if the run was completed before.
            ValueError: if total_steps is less than 1, or not an int: no step would be the last one.
        """
        if not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps must be an int of at least 1, and is {total_steps!r}")
        accelerator, args = self.accelerator, self.args
        self.total_steps, self.steps_per_epoch = total_steps, len(train_loader)
        self.samples_per_epoch = train_loader.num_samples
        self.batch_size, self.state = train_loader.sampler.batch_size, checkpoint
        self.model_copy = model_parts.copy if model_parts else None
        check_batch_norms(checkpoint.values(), train_loader.sampler)
        # 1. What must be the same on all processes, and when the run is resumed.
        data = same_on_all(describe_data(train_loader, test_loader, data or {}))
        invariants = {name: vars(args)[name] for name in vars(args).get("resume_invariants", ())}
        invariants |= train_loader.resume_invariants()
        invariants |= {"data": data["fingerprint"], "total_steps": total_steps}
        invariants |= {"save_best": args.save_best}  # the file of the best model is of this metric
        invariants |= resume_invariants or {}
        topology = banner.describe_topology(accelerator)
        # 2. Go on where the newest checkpoint is.
        folder = self.folder.path / "checkpoints"
        self.checkpoints = Checkpoints(
            accelerator, folder, checkpoint, invariants, args.keep_checkpoints, self.model_copy
        )
        self.step, extra, saved_metrics = self.checkpoints.load()
        self.best.load_state(extra)
        self.metrics = Metrics(accelerator, saved_metrics, all_ranks_add=model_parts is None)
        # 3. Say so; a run that was completed before ends here.
        batch = model_parts.batch if model_parts else None
        banner.announce(
            accelerator, topology, self.folder.path, self.steps_per_epoch, total_steps, data, self.batch_size, batch
        )
        self._exit_if_completed()
        # 4. From here on it is a run: what flags ask for, log files.
        self._attach_extras(topology)
        test_samples = test_loader.num_samples if test_loader else 0
        test_steps = test_samples / self.batch_size / 3  # forward is a third of a step
        is_main = accelerator.is_main_process
        self.progress = Progress(self.step, total_steps, self.steps_per_epoch, test_steps, shows=is_main)
        if is_main:
            about_run = {"arguments": as_json(vars(args)), "data": data, "total_steps": total_steps}
            about_launch = {**topology, **(model_parts.notes if model_parts else {})}
            self.folder.open(self.step, extra.get("metrics_bytes", 0), about_run, about_launch)

    def _exit_if_completed(self) -> None:
        if not self.step or self.folder.completed_step(self.accelerator) != self.step:
            return
        done = f"all {self.step} steps are done"
        if self.step < self.total_steps:
            done = f"the run stopped early, after {plural(self.step, 'step')}"
        self.accelerator.print(f"{done}: nothing to do")
        self.accelerator.end_training()
        raise SystemExit(0)

    def _attach_extras(self, topology: dict) -> None:
        """Everything that a run may have beside its core; what concerns the process is in launch.py. Collective."""
        accelerator, args, parts = self.accelerator, self.args, self.state.values()
        models = [part for part in parts if isinstance(part, nn.Module)]
        self.trackers = self.profiler = self.same_weights = None
        if accelerator.num_processes > 1 and self.model_copy is None:
            from .parallel import same_weights

            self.same_weights = same_weights
        if getattr(accelerator, "virtual_processes", 0):
            from .parallel import virtual_processes

            virtual_processes.sum_gradients_by_tree(accelerator, models)
            if self.step:
                virtual_processes.warn_of_other_rounding(accelerator, self.folder.path, topology)
        if args.profile:
            from .extras.profiling import Profiler

            optimizers = [part for part in parts if isinstance(part, AcceleratedOptimizer)]
            self.profiler = Profiler(
                accelerator, self.folder.path, args.profile, models, optimizers, self.total_steps - self.step
            )
        if accelerator.log_with:
            from .extras.trackers import Trackers

            config = {name: v for name, v in vars(args).items() if isinstance(v, (int, float, str))}
            self.trackers = Trackers(accelerator, config)

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs to go, until `total_steps` steps are done or --patience ends the run.

        A run resumed at the end of an epoch begins with that epoch's test. The generators of torch, Python and NumPy
        are seeded here and after `batches`: what a script draws between them is the same when resumed.
        """
        first = max(self.step - 1, 0) // self.steps_per_epoch
        for epoch in range(first, math.ceil(self.total_steps / self.steps_per_epoch)):
            seed_generators_for(self.accelerator.device, combine(self.args.seed, epoch, 1))
            yield epoch
            if self.best.is_stuck(self.args.patience):
                self.stopped_early = self.step < self.total_steps
                self._save()
                if self.stopped_early and self.accelerator.is_main_process:
                    tests = plural(self.best.tests_since_best, "test")
                    show(f"stopped early: {tests} in a row without a better {self.best.monitor}")
                return

    def batches(self, loader: GlobalLoader, epoch: int) -> Iterator[Batch]:
        """The micro-batches of an epoch that are still to go; between steps it logs, saves and stops. Collective.

        A step is done when the next batch is asked for: do not leave the loop by `break`. Before every micro-batch,
        the generators of torch, Python and NumPy are seeded by its place in the run: dropout inside a model, or a
        mixup in the loop, is the same when resumed, and on P processes as on one with P accumulation steps.
        """
        optimizers = self.checkpoints.optimizers.values()
        if loader.sampler.num_slots > 1 and any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            stop("LBFGS needs all micro-batches of a step in its closure: take `run.steps` in place of `run.batches`")
        batches = loader.epoch(epoch, self.step - epoch * self.steps_per_epoch)
        yield from self._loop(batches, loader.sampler.accumulation, epoch, self._seed_model)

    def steps(self, loader: GlobalLoader, epoch: int) -> Iterator[list[Batch]]:
        """As `batches`, but all micro-batches of a step at once, in a list. Collective."""
        batches = loader.epoch(epoch, self.step - epoch * self.steps_per_epoch)
        windows = map(list, zip(*[batches] * loader.sampler.accumulation, strict=True))
        yield from self._loop(windows, 1, epoch, lambda window: self._seed_model(window[0]))

    def _loop(self, items: Iterable, items_per_step: int, epoch: int, seed: Callable) -> Iterator:
        if self.profiler is not None:
            items = self.profiler.waits(items)
        for number, item in enumerate(self.progress.timed(items, items_per_step), 1):
            if number % items_per_step == 1 or items_per_step == 1:
                rates = {name: float(o.param_groups[0]["lr"]) for name, o in self.checkpoints.optimizers.items()}
                names = ["lr"] if len(rates) == 1 else [f"{name}_lr" for name in rates]
                self.learning_rates = dict(zip(names, rates.values(), strict=True))
            seed(item)
            yield item
            is_last = number % items_per_step == 0
            if self.accelerator.sync_gradients != is_last:
                raise RuntimeError(
                    "gradient accumulation is out of step with the batches: put forward, backward and the "
                    "optimizer's step into one `with accelerator.accumulate(model):` for each batch (all models "
                    "in one call)"
                )
            if is_last:
                self._step_done(epoch)
                if self.step == self.total_steps:
                    break
        seed_generators_for(self.accelerator.device, combine(self.args.seed, epoch, 2))

    def _seed_model(self, batch: Batch, test_batch: int = 0) -> None:
        """test_batch: 0 in training; in a test, the number of the batch from 1 on."""
        hang_watchdog.reached(self.step)
        seed_generators_for(self.accelerator.device, combine(self.args.seed, self.step, batch.slot, test_batch))

    def _step_done(self, epoch: int) -> None:
        """Count a step; then what is due after it: a log line, a checkpoint, a stop. Collective."""
        samples_before = self.step % self.steps_per_epoch * self.batch_size
        self.progress.timer.samples += min(self.batch_size, self.samples_per_epoch - samples_before)
        self.step += 1
        if self.profiler is not None:
            self.profiler.step()
        args = self.args
        epoch_ends = self.step % self.steps_per_epoch == 0 or self.step == self.total_steps
        if self.step % args.log_every == 0 or epoch_ends:
            means = self.metrics.reduce()
            del means["samples"]
            self.log("train", epoch, **means, **self.learning_rates, **self.progress.timer.since_last_line())
        self.before_test = self._extra() if epoch_ends else None
        due = self.step % args.checkpoint_every == 0 if args.checkpoint_every else epoch_ends
        if due or self.step == self.total_steps:
            self._save()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """After a signal, or where a checkpoint could not be written: save, and end. Collective."""
        if self.stop_signal.agreed(self.checkpoints.failed()):
            self._save()
            self.checkpoints.wait()
            self.stop_signal.leave(self.step)

    def _extra(self) -> dict:
        """What a checkpoint has besides the state."""
        return {"metrics_bytes": self.folder.metrics_bytes(), **self.best.state()}

    def _save(self) -> None:
        self.metrics.check()
        if self.same_weights is not None:
            self.same_weights.check(self.accelerator, self.checkpoints.models)
        # A run that is resumed at the end of an epoch begins with the test: a checkpoint that is
        # saved after that test must not have its result already.
        extra = self.before_test or self._extra()
        self.checkpoints.save(self.step, self.metrics.state(), extra, self.folder.sync)

    def log_train(self, batch: Batch, *, weights: torch.Tensor | None = None, **values: torch.Tensor) -> None:
        """Add a micro-batch to the means of the next log line: `run.log_train(batch, loss=losses, error_px=errors)`.

        Args:
            values: (n,), one per sample.
            weights: (n,); None: those of the batch, else all samples count alike.
        """
        self.metrics.add(batch, weights=weights, step=self.step, **values)

    def log(self, split: str, epoch: int, *, step: int | None = None, **metrics: float) -> None:
        """A line of your own in metrics.jsonl, on the screen and in the trackers.

        Args:
            split: its first word.
            epoch: from 0 on.
            step: steps done; None: `self.step`, in which the step under way does not count yet.
        """
        step = self.step if step is None else step
        metrics = {name: plain(value) for name, value in metrics.items()}
        metrics = {name: value for name, value in metrics.items() if is_number(value)}
        if self.trackers is not None:
            self.trackers.log({f"{split}/{name}": value for name, value in metrics.items()}, step)
        if self.accelerator.is_main_process:
            self.folder.write_metrics({"split": split, "step": step, "epoch": epoch + 1, **metrics})
            self.progress.show_line(split, step, epoch + 1, metrics)

    def test_batches(self, loader: GlobalLoader) -> Iterator[Batch]:
        """The batches of a test set. Shows how far the test is; stops the run after a signal. Collective."""
        for batches in self.test_steps(loader):
            yield from batches

    def test_steps(self, loader: GlobalLoader) -> Iterator[list[Batch]]:
        """As `test_batches`, but in lists of as many micro-batches as the loader's `accumulation`. Collective."""
        windows = zip(*[loader.epoch()] * loader.sampler.accumulation, strict=True)
        for number, window in enumerate(windows, 1):
            self._seed_model(window[0], test_batch=number)
            yield list(window)
            done = min(number * loader.sampler.batch_size, loader.num_samples)
            self.progress.show_test(self.step, done, loader.num_samples)
            self._stop_if_asked()

    def new_metrics(self) -> Metrics:
        """Metrics for a test: `add` each batch, then `reduce`."""
        return Metrics(self.accelerator, all_ranks_add=self.model_copy is None, test_after=self.step)

    def log_test(self, result: dict) -> None:
        """Log the numbers of `result`, the same on every rank; all of it goes to summary.json. Collective.

        Keeps the best value of every number, and with --save_best the model that had it.

        Args:
            result: by name, numbers, and what else may be of interest: tensors, arrays, lists.

        Raises:
            SystemExit: if --save_best or --patience names a metric that the result does not have, or if the numbers
                differ between processes.
            ValueError: if a name is taken.
        """
        for name in LINE & result.keys():
            raise ValueError(f"a number of a test cannot be named {name}: a line of metrics.jsonl has that already")
        result = {name: plain(value) for name, value in result.items()}
        numbers = {name: value for name, value in result.items() if is_number(value)}
        args, monitor = self.args, self.best.monitor
        if (args.save_best or args.patience) and monitor not in numbers:
            known = ", ".join(name for name in numbers if name != "samples") or "none"
            flag = f"--save_best {monitor}" if args.save_best else "--patience"
            stop(f"{flag} needs the metric {monitor}, and the test has {known}: name one of these with --save_best")
        if self.same_weights is not None:
            self.same_weights.check_result(numbers)
        self.best.add(numbers, self.step)
        if args.save_best and self.best.tests_since_best == 0:
            self._save_models("_best")
        self.log("test", math.ceil(self.step / self.steps_per_epoch) - 1, **numbers)
        self.last_test = result

    def _save_models(self, suffix: str = "") -> None:
        for name in self.checkpoints.models:
            model = self.state[name]
            if isinstance(model, AveragedModel):
                model = model.module
            save_model(self.accelerator, model, self.folder.path / f"{name}{suffix}.safetensors", self.model_copy)

    def add_to_summary(self, **values) -> None:
        """Add values of your own to summary.json."""
        self.more_summary |= {name: plain(value) for name, value in values.items()}

    def finish(self) -> None:
        """Save every model as <name>.safetensors; write summary.json and curves.png. Collective."""
        self.checkpoints.wait()
        self._save_models()
        self.add_to_summary(peak_memory_gib=round(peak_memory_gib(self.accelerator), 3))
        if self.accelerator.is_main_process:
            self.progress.close()
            self._write_summary()
        if self.trackers is not None:
            self.trackers.finish()
        self.accelerator.end_training()
        if self.accelerator.is_main_process:
            self._draw_and_say_done()

    def _write_summary(self) -> None:
        best = {f"best_{name}": value for name, (value, _) in self.best.values.items() if name != "samples"}
        if self.args.save_best and self.best.monitor in self.best.values:
            best["best_step"] = self.best.values[self.best.monitor][1]
        elif self.args.save_best:
            show(f"warning: no best {self.best.monitor} was kept: the run has no test", "yellow")
        self.folder.write_summary(
            {
                "step": self.step,
                **{f"test_{name}": value for name, value in self.last_test.items()},
                **best,
                **self.more_summary,
                "stopped_early": self.stopped_early,
                "checkpoint_time_s": round(self.checkpoints.save_time_s, 4),
                **self.progress.summary(self.step),
            }
        )

    def _draw_and_say_done(self) -> None:
        path = self.folder.path
        title = f"{path.name}: {self.step} steps of {self.batch_size} samples"
        plot_curves(path / "metrics.jsonl", path / "curves.png", title)
        numbers = {n: v for n, v in self.last_test.items() if is_number(v) and n != "samples"}
        shown = [f"test {metric_text(name, value)}" for name, value in numbers.items()]
        result = ", ".join(shown[:3]) or f"{self.step} steps"
        train_s = self.progress.timer.train_s
        show(f"done: {result} in {train_s:.1f} s of training; model, curves and summary in {path}", "green")


def check_batch_norms(state: Iterable, sampler: GlobalSampler) -> None:
    """Check that models with BatchNorm get micro-batches of one size: their statistics would not count alike.

    Raises:
        SystemExit: if not.
    """
    models = [part for part in state if isinstance(part, nn.Module)]
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if sampler.batch_size % sampler.num_slots and any(layer.training for layer in layers):
        stop(
            f"--batch_size {sampler.batch_size} does not divide by {sampler.num_slots} micro-batches, and the model "
            "has BatchNorm, which needs micro-batches of one size"
        )
