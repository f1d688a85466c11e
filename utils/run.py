"""The bookkeeping of a training run: which step, what to log, when to save, when to stop, how to
resume.

Forward, loss, backward, clipping and the optimizer's step stay in the script; nothing here calls
them.
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

from .atomic_files import read_entry
from .checkpoint import Checkpoints, save_model
from .console import plural, show, stop
from .features.hang_watchdog import reached
from .features.profiling import Profiler
from .features.virtual_processes import sum_gradients_by_tree
from .flags import as_json
from .loader import Batch, GlobalLoader
from .metrics import Metrics
from .randomness import combine
from .run_folder import Tracker, is_number
from .sampler import GlobalSampler, virtual_processes
from .signals import StopSignal
from .topology import announce, decides_rounding, describe, same_on_all

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
# Words in the names of metrics of which less is better.
LOWER_IS_BETTER = {"loss", "error", "errors", "mse", "rmse", "mae", "nll", "perplexity", "wer", "cer"}


class Run:
    """One training run in one folder.

        run = Run(accelerator, args)
        run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, "optimizer": optimizer})
        for epoch in run.epochs():
            for batch in run.batches(train_loader, epoch):
                ...
                run.log_train(batch, loss=losses)
            run.log_test(evaluate(...))
        run.finish()

    args: `output_dir`, and those of DEFAULTS that your parser has (`ArgumentParser.add_run_flags`
    adds all of them); the rest is recorded in run.json. `args.resume_invariants`, the names of flags that
    a resumed run must have the same values for, comes from `ArgumentParser.add_argument_group(...,
    resume_invariant=True)`.

    step: steps done, the one number that says where the run is.
    folder: where the run writes.

    Raises: SystemExit on every rank, in one sentence, if the folder holds a run and --resume is not
    given, if another process writes to it, or if it cannot be written to. Collective.
    """

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace):
        self.accelerator = accelerator
        self.args = argparse.Namespace(**{**DEFAULTS, **vars(args)})
        self.folder = Path(args.output_dir)
        self.stop_signal = StopSignal(accelerator)
        self.tracker = Tracker(accelerator, self.folder, self.args.resume)
        self.monitor, self.lower_is_better = metric_direction(self.args.save_best or "loss")
        self.step = 0
        self.best = {}  # by test metric: [best value, its step]
        self.tests_since_best = 0
        self.before_test = None  # what a checkpoint has from before the test of this step
        self.stopped_early = False
        self.last_test = {}
        self.notes = {}
        self.all_ranks_add = True

    def start(
        self,
        train_loader: GlobalLoader,
        test_loader: GlobalLoader | None,
        total_steps: int,
        *,
        checkpoint: dict,
        data: dict | None = None,
        resume_invariants: dict | None = None,
        describe_batch: str | None = None,
        launch_notes: dict | None = None,
        model_copy: int | None = None,
    ) -> None:
        """Resume if asked to, say what is going to run, and begin to record. Collective: call it on
        every rank.

        total_steps: optimizer steps of the whole run.
        checkpoint: by name, everything that a checkpoint must hold, as `prepare` returned it: any number
        of models, optimizers, schedules, moving averages, and objects of your own with state_dict
        and load_state_dict.
        data: more about the data, for run.json and the screen; its "fingerprint" replaces the
        loaders' own.
        resume_invariants: what else a resumed run must have the same value for, by name.
        describe_batch, launch_notes, model_copy: for scripts whose processes share the model; see
        topology.announce, run.json and checkpoint.Checkpoints.

        Raises: SystemExit on every rank, in one sentence, if processes have different data or the
        checkpoint does not fit; with exit code 0 if the run was completed before.
        """
        self.total_steps = total_steps
        self.steps_per_epoch = len(train_loader)
        self.state = state = checkpoint
        self.data = self._describe_data(train_loader, test_loader, data or {})
        flags = vars(self.args)
        fixed = {name: flags[name] for name in flags.get("resume_invariants", ())}
        fixed |= train_loader.resume_invariants()
        fixed |= {"data": self.data["fingerprint"], "total_steps": total_steps}
        # The file of the best model is of this metric.
        fixed["save_best"] = self.args.save_best
        fixed |= resume_invariants or {}
        self.checkpoints = Checkpoints(
            self.accelerator, self.folder / "checkpoints", state, fixed, self.args.keep_checkpoints, model_copy
        )
        check_batch_norms(self.checkpoints.models.values(), train_loader.sampler)
        topology = describe(self.accelerator, split_batch=describe_batch is None)
        self.step, extra, saved_metrics = self.checkpoints.load()
        self.best = extra.get("best", {})
        self.tests_since_best = extra.get("tests_since_best", 0)
        # A pipeline has losses on its last stage only.
        self.all_ranks_add = model_copy is None
        if virtual_processes(self.accelerator):
            models = [part for part in state.values() if isinstance(part, nn.Module)]
            sum_gradients_by_tree(self.accelerator, models)
        self.metrics = Metrics(self.accelerator, saved_metrics, self.all_ranks_add)
        batch_size = train_loader.sampler.batch_size
        announce(
            self.accelerator,
            topology,
            self.folder,
            self.steps_per_epoch,
            total_steps,
            self.data,
            batch_size,
            describe_batch,
        )
        if self.step and self.tracker.completed_step() == self.step:
            done = f"all {self.step} steps are done"
            if self.step < total_steps:
                done = f"the run stopped early, after {plural(self.step, 'step')}"
            self.accelerator.print(f"{done}: nothing to do")
            self.accelerator.end_training()
            raise SystemExit(0)
        models = list(self.checkpoints.models)
        optimizers = [each for each in state.values() if isinstance(each, AcceleratedOptimizer)]
        self.profiler = Profiler(
            self.accelerator,
            self.folder,
            self.args.profile,
            [state[name] for name in models],
            optimizers,
            total_steps - self.step,
        )
        self._start_trackers()
        if virtual_processes(self.accelerator) and self.step:
            self._warn_of_other_rounding(topology)
        test_samples = test_loader.num_samples if test_loader else 0
        self.tracker.start(
            self.step,
            total_steps,
            self.steps_per_epoch,
            extra.get("metrics_bytes", 0),
            record={"arguments": as_json(flags), "data": self.data},
            launch={**topology, **(launch_notes or {})},
            test_steps=test_samples / batch_size / 3,  # forward is a third of a step
        )

    def _describe_data(self, train_loader, test_loader, data: dict) -> dict:
        """What run.json, the screen and the comparison with other processes and launches have of
        the data. Collective."""
        train = train_loader.describe()
        found = {"train": train["items"]}
        fingerprints = [train["fingerprint"]]
        if test_loader is not None:
            test = test_loader.describe()
            found["test"] = test["items"]
            fingerprints.append(test["fingerprint"])
        found["fingerprint"] = "-".join(dict.fromkeys(fingerprints))
        return same_on_all({**data, **{k: v for k, v in found.items() if k not in data}})

    def _warn_of_other_rounding(self, topology: dict) -> None:
        """--virtual_processes promises the same bits on the same kind of machine only."""
        if not self.accelerator.is_main_process:
            return
        launches = read_entry(self.folder / "run.json", "launches", list)
        if not launches:  # the tracker says so
            return
        before, now = decides_rounding(launches[-1]), decides_rounding(topology)
        if before != now:
            show(
                f"warning: this run has been on {', '.join(before)} and goes on on "
                f"{', '.join(now)}: its last bits are not those of a run on one kind alone",
                "yellow",
            )

    def _start_trackers(self) -> None:
        if not self.accelerator.log_with:
            return
        config = {name: v for name, v in vars(self.args).items() if isinstance(v, (int, float, str))}
        self.accelerator.init_trackers("run", config=config)
        for tracker in self.accelerator.trackers:
            place = getattr(tracker, "logging_dir", None)
            if place is not None:
                self.accelerator.print(f"{tracker.name:<12}  {place}", flush=True)

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs to go. A run resumed at the end of an epoch begins with that
        epoch's test.

        Ends after `total_steps` steps, or when `patience` tests in a row were not better than the
        best.
        """
        first = max(self.step - 1, 0) // self.steps_per_epoch
        for epoch in range(first, math.ceil(self.total_steps / self.steps_per_epoch)):
            yield epoch
            if self.args.patience and self.tests_since_best >= self.args.patience:
                self.stopped_early = self.step < self.total_steps
                self._save()
                if self.stopped_early and self.accelerator.is_main_process:
                    tests = plural(self.tests_since_best, "test")
                    show(f"stopped early: {tests} in a row without a better {self.monitor}")
                return

    def batches(self, loader: GlobalLoader, epoch: int) -> Iterator[Batch]:
        """The micro-batches of an epoch that are still to go; between steps it logs, saves and
        stops where it is due.

        A step is done when the next batch is asked for: do not leave the loop by `break`. Before
        every micro-batch, torch's generators are seeded by its place in the run, so that dropout
        inside a model is the same after a resume, and on P processes as on one process with P
        accumulation steps.
        """
        batches = loader.epoch(epoch, self.step - epoch * self.steps_per_epoch)
        yield from self._loop(batches, loader.sampler.accumulation, epoch, self._seed_model)

    def steps(self, loader: GlobalLoader, epoch: int) -> Iterator[list[Batch]]:
        """As `batches`, but all micro-batches of a step at once, in a list."""
        batches = loader.epoch(epoch, self.step - epoch * self.steps_per_epoch)
        windows = zip(*[batches] * loader.sampler.accumulation, strict=True)
        yield from self._loop(map(list, windows), 1, epoch, lambda window: self._seed_model(window[0]))

    def _loop(self, items: Iterable, items_per_step: int, epoch: int, seed: Callable) -> Iterator:
        items = self.tracker.timed(self.profiler.waits(items), items_per_step)
        for number, item in enumerate(items, 1):
            if number % items_per_step == 1 or items_per_step == 1:
                self.learning_rates = self._learning_rates()
            seed(item)
            yield item
            self._check_accumulation(number % items_per_step == 0)
            if number % items_per_step == 0:
                batch = item[0] if isinstance(item, list) else item
                self.tracker.samples += batch.step_samples
                self._step_done(epoch)
                if self.step == self.total_steps:
                    return

    def _seed_model(self, batch: Batch, test_batch: int = 0) -> None:
        """test_batch: 0 in training; in a test, the number of the batch from 1 on."""
        reached(self.step)
        key = combine(self.args.seed, self.step, batch.part, test_batch)
        torch.default_generator.manual_seed(key)
        if self.accelerator.device.type != "cpu":
            torch.get_device_module(self.accelerator.device).manual_seed(key)

    def _learning_rates(self) -> dict[str, float]:
        optimizers = self.checkpoints.optimizers
        return {
            "lr" if len(optimizers) == 1 else f"{name}_lr": float(optimizer.param_groups[0]["lr"])
            for name, optimizer in optimizers.items()
        }

    def _check_accumulation(self, is_last: bool) -> None:
        """Raises: RuntimeError where optimizers step in a micro-batch that does not end a step,
        or not in one that does."""
        if self.accelerator.sync_gradients != is_last:
            raise RuntimeError(
                "gradient accumulation is out of step with the batches: put forward, backward and "
                "the optimizer's step into "
                "one `with accelerator.accumulate(model):` for each batch (all models in one call)"
            )

    def _step_done(self, epoch: int) -> None:
        """Count a step; then what is due after it: a log line, a checkpoint, a stop.
        Collective."""
        self.step += 1
        self.profiler.step()
        args = self.args
        epoch_ends = self.step % self.steps_per_epoch == 0 or self.step == self.total_steps
        if self.step % args.log_every == 0 or epoch_ends:
            means = self.metrics.reduce()
            del means["samples"]
            self.tracker.log("train", self.step, epoch + 1, {**means, **self.learning_rates})
        self.before_test = self._progress() if epoch_ends else None
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

    def _progress(self) -> dict:
        """What a checkpoint has besides the state."""
        return {
            "metrics_bytes": self.tracker.metrics_bytes(),
            "best": dict(self.best),
            "tests_since_best": self.tests_since_best,
        }

    def _save(self) -> None:
        self.metrics.check()
        # A run that is resumed at the end of an epoch begins with the test: a checkpoint that is
        # saved after that test must not have its result already.
        extra = self.before_test or self._progress()
        self.checkpoints.save(self.step, self.metrics.state(), extra, self.tracker.sync)

    def log_train(self, batch: Batch, *, weights: torch.Tensor | None = None, **values: torch.Tensor) -> None:
        """Add a micro-batch to the metrics of the next log line: `run.log_train(batch, loss=losses,
        error_px=errors)`.

        values: (n,), one a sample. weights: (n,); None: those of the batch, else all samples count
        alike.
        """
        self.metrics.add(batch, weights=weights, step=self.step, **values)

    def log(self, split: str, epoch: int, *, step: int | None = None, **metrics: float) -> None:
        """A line of your own in metrics.jsonl, on the screen and in the trackers.

        split: its first word. step: steps done; None: `self.step`, in which the step under way
        does not count yet.
        """
        self.tracker.log(split, self.step if step is None else step, epoch + 1, metrics)

    def test_batches(self, loader: GlobalLoader) -> Iterator[Batch]:
        """The batches of a test set. Shows how far the test is, and stops the run when a signal
        asks for that."""
        for batches in self.test_steps(loader):
            yield from batches

    def test_steps(self, loader: GlobalLoader) -> Iterator[list[Batch]]:
        """As `test_batches`, but in lists of as many micro-batches as the loader's
        `accumulation`."""
        done = 0
        windows = zip(*[loader.epoch()] * loader.sampler.accumulation, strict=True)
        for number, window in enumerate(windows, 1):
            self._seed_model(window[0], test_batch=number)
            yield list(window)
            done += window[0].step_samples
            self.tracker.show_test(self.step, done, loader.num_samples)
            self._stop_if_asked()

    def new_metrics(self) -> Metrics:
        """Metrics for a test: `add` each batch, then `reduce`."""
        return Metrics(self.accelerator, all_ranks_add=self.all_ranks_add)

    def log_test(self, result: dict) -> None:
        """Log the numbers of `result`, the same on every rank; all of it goes to summary.json.
        Collective.

        Keeps the best value of every number, and with --save_best the model that had it.
        Raises: SystemExit if --save_best or --patience names a metric that the result does not
        have.
        """
        result = {name: v.item() if isinstance(v, torch.Tensor) else v for name, v in result.items()}
        numbers = {name: value for name, value in result.items() if is_number(value)}
        if (self.args.save_best or self.args.patience) and self.monitor not in numbers:
            known = ", ".join(name for name in numbers if name != "samples") or "none"
            flag = f"--save_best {self.monitor}" if self.args.save_best else "--patience"
            stop(
                f"{flag} needs the metric {self.monitor}, and the test has {known}: name one of these with --save_best"
            )
        self.tests_since_best += 1
        for name, value in numbers.items():
            _, lower = metric_direction(name)
            if name == self.monitor:
                lower = self.lower_is_better
            if name not in self.best or is_better(value, self.best[name][0], lower):
                self.best[name] = [value, self.step]
                if name == self.monitor:
                    self.tests_since_best = 0
        if self.args.save_best and self.tests_since_best == 0:
            self._save_models("_best")
        epoch = math.ceil(self.step / self.steps_per_epoch)
        self.tracker.log("test", self.step, epoch, numbers)
        self.last_test = result

    def _save_models(self, suffix: str = "") -> None:
        for name in self.checkpoints.models:
            model = self.state[name]
            if isinstance(model, AveragedModel):
                model = model.module
            file = self.folder / f"{name}{suffix}.safetensors"
            save_model(self.accelerator, model, file, self.checkpoints.model_copy)

    def add_to_summary(self, **values) -> None:
        """Add numbers of your own to summary.json."""
        self.notes |= values

    def finish(self) -> None:
        """Save every model as <name>.safetensors; write summary.json and curves.png. Collective."""
        self.checkpoints.wait()
        self._save_models()
        best = {f"best_{name}": value for name, (value, _) in self.best.items() if name != "samples"}
        if self.args.save_best and self.monitor in self.best:
            best["best_step"] = self.best[self.monitor][1]
        elif self.args.save_best and self.accelerator.is_main_process:
            show(f"warning: no best {self.monitor} was kept: the run has no test", "yellow")
        batch_size = self.checkpoints.fixed["batch_size"]
        title = f"{self.folder.name}: {self.step} steps of {batch_size} samples"
        self.tracker.finish(
            self.step,
            self.last_test,
            title,
            **best,
            **self.notes,
            stopped_early=self.stopped_early,
            checkpoint_time_s=round(self.checkpoints.save_time_s, 4),
        )


def check_batch_norms(models: Iterable[nn.Module], sampler: GlobalSampler) -> None:
    """Raises: SystemExit if a model has BatchNorm and micro-batches have different sizes: their
    statistics would not count alike, and one sample has no variance."""
    if sampler.batch_size % sampler.num_slots == 0:
        return
    layers = [module for model in models for module in model.modules()]
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in layers):
        stop(
            f"--batch_size {sampler.batch_size} does not divide by {sampler.num_slots} "
            "micro-batches, and the model has BatchNorm, which needs micro-batches of one size"
        )


def metric_direction(metric: str) -> tuple[str, bool]:
    """The name in METRIC, min:METRIC or max:METRIC, and whether less is better; by default so for
    losses and errors."""
    direction, colon, name = metric.partition(":")
    if colon and direction in ("min", "max"):
        return name, direction == "min"
    return metric, not LOWER_IS_BETTER.isdisjoint(metric.lower().split("_"))


def is_better(value: float, best: float, lower_is_better: bool) -> bool:
    """Any number is better than NaN."""
    if math.isnan(best):
        return not math.isnan(value)
    return value < best if lower_is_better else value > best
