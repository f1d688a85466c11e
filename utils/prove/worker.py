"""Runs a script as `python -m utils.prove` asks for, and records what it does, step by step.

    accelerate launch --config_file CONFIG -m utils.prove.worker SETTINGS.json mine.py [flags of the script]

The script itself is not changed: it imports recording parts in place of make_accelerator, GlobalLoader and Run.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.utils.data import default_collate

from .. import launch, loader, run
from ..checkpoint.state import parameters_of
from ..fingerprint import digest
from .tensors import sampled


class Settings(NamedTuple):
    """How to run: short, over the end of an epoch, and on micro-batches that are not all of one size."""

    folder: str  # of the run
    steps: int
    batch_size: int
    accumulation: int = 1
    num_workers: int | None = None  # None: as the script says
    resume: bool = False
    float64: bool = False
    weights_of: str | None = None  # the folder of a run of the same script, with whose weights each step begins

    @property
    def train_items(self) -> int:
        """Items of an epoch: three whole steps, and one of two items."""
        return 3 * self.batch_size + 2

    @property
    def test_items(self) -> int:
        return self.batch_size + self.batch_size // 2 - 1

    def apply(self, args: argparse.Namespace) -> None:
        """Set the arguments of a script."""
        if self.float64:
            torch.set_default_dtype(torch.float64)
        if hasattr(args, "batch_size"):
            args.batch_size = self.batch_size
        args.gradient_accumulation_steps = self.accumulation
        args.output_dir, args.resume = self.folder, self.resume
        args.checkpoint_every = args.log_every = 1
        args.keep_checkpoints = args.patience = args.profile = 0
        args.log_with = None


def tensors_in(state) -> Iterator[torch.Tensor]:
    """All tensors in a nested state_dict."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors_in(part)


@dataclasses.dataclass
class RecordedBatch(loader.Batch):
    digests: list[str] | None = None  # of the items' contents


class DigestingCollate:
    """A collate_fn that also returns a digest of each item."""

    def __init__(self, collate_fn):
        self.collate_fn = collate_fn

    def __call__(self, items: list):
        digests = [digest(item) for item in items]
        return self.collate_fn(items), digests


class RecordingLoader(loader.GlobalLoader):
    settings: Settings

    def __init__(self, dataset, batch_size, accelerator, **options):
        settings, collate_fn, weigh = self.settings, options.get("collate_fn"), options.get("loss_weights")
        options["max_samples"] = settings.test_items if options.get("seed") is None else settings.train_items
        if settings.num_workers is not None:
            options["num_workers"] = settings.num_workers
        # A TensorDataset without a collate_fn is indexed on the device: that is not changed.
        self.has_digests = collate_fn is not None or not loader.gives_its_tensors(dataset)
        if self.has_digests:
            options["collate_fn"] = DigestingCollate(collate_fn or default_collate)
            options["loss_weights"] = weigh and (lambda data: weigh(data[0]))
        super().__init__(dataset, settings.batch_size, accelerator, **options)

    def epoch(self, epoch: int = 0, first_step: int = 0) -> Iterator[RecordedBatch]:
        for batch in super().epoch(epoch, first_step):
            batch = RecordedBatch(*(getattr(batch, field.name) for field in dataclasses.fields(batch)))
            if self.has_digests:
                batch.data, batch.digests = batch.data
            else:
                batch.digests = [digest(item) for item in zip(*batch.data, strict=True)]
            yield batch


class RecordingRun(run.Run):
    settings: Settings

    def start(self, train_loader, test_loader, total_steps, *, checkpoint, **options) -> None:
        total_steps = min(total_steps, self.settings.steps)
        super().start(train_loader, test_loader, total_steps, checkpoint=checkpoint, **options)
        self.same_weights = None  # weights that differ are a finding, and not the end of the run
        self.recorder = Recorder(self.accelerator, self.checkpoints, checkpoint, self.settings)

    def batches(self, train_loader, epoch):
        for batch in super().batches(train_loader, epoch):
            if batch.micro_step == 0:
                self.recorder.begin_step(batch, self.step)
            self.recorder.begin_micro_batch(batch)
            yield batch
            if batch.micro_step == train_loader.sampler.accumulation - 1:
                self.recorder.end_step(is_last=self.step + 1 == self.total_steps)

    def steps(self, train_loader, epoch):
        for batches in super().steps(train_loader, epoch):
            self.recorder.begin_step(batches[0], self.step)
            for batch in batches:
                self.recorder.begin_micro_batch(batch)
            yield batches
            self.recorder.end_step(is_last=self.step + 1 == self.total_steps)

    def log_train(self, batch, *, weights=None, **values) -> None:
        super().log_train(batch, weights=weights, **values)
        self.recorder.step["samples"][batch.micro_step]["values"] |= recorded_values(batch, values)

    def new_metrics(self):
        metrics = super().new_metrics()
        add, samples = metrics.add, self.recorder.new_pass()

        def recording_add(batch, **options):
            add(batch, **options)
            values = {name: value for name, value in options.items() if name not in ("weights", "step")}
            samples.append(recorded_batch(batch) | {"values": recorded_values(batch, values)})

        metrics.add = recording_add
        return metrics

    def log_test(self, result: dict) -> None:
        super().log_test(result)
        self.recorder.end_test(self.step, result)


def recorded_batch(batch: RecordedBatch) -> dict:
    """Without what a stand-in has, which counts nothing."""
    return {"indices": batch.counted(batch.indices).cpu(), "digests": batch.digests, "values": {}}


def recorded_values(batch: RecordedBatch, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without scalars: the mean of a micro-batch is another one for other micro-batches."""
    return {name: batch.counted(value.detach()).cpu().double() for name, value in values.items() if value.ndim}


class Recorder:
    """Records one process's run, in record_rank<r>.pt.

    Args:
        checkpoints: the run's: knows the models, the optimizers, and the names of the parameters.
        checkpoint: by name, the models, optimizers and all else that `run.start` got.
    """

    def __init__(self, accelerator, checkpoints, checkpoint: dict, settings: Settings):
        self.accelerator, self.settings, self.checkpoint = accelerator, settings, checkpoint
        self.models, self.optimizers = checkpoints.models, checkpoints.optimizers
        self.names = checkpoints.parameter_names
        self.steps, self.tests, self.passes = [], [], []
        self.step = None  # the record of the step under way
        self.has_ended = False
        for name, optimizer in self.optimizers.items():
            optimizer.register_step_pre_hook(functools.partial(self._before_optimizer, name))
        for model in self.models.values():
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        accelerator.around_backward.append(self._record_gradients)

    def begin_step(self, batch, steps_done: int) -> None:
        if self.settings.weights_of is not None and steps_done:
            self._load_weights(Path(self.settings.weights_of) / "checkpoints" / f"step_{steps_done:08d}")
        self.step = {"step": steps_done + 1, "step_samples": batch._step_samples, "samples": [], "gradients": {}}
        self.step |= {"at_step": {}, "optimizer_calls": {}, "learning_rates": {}}

    def begin_micro_batch(self, batch) -> None:
        self.step["samples"].append(recorded_batch(batch) | {"inputs": None})

    def _load_weights(self, folder: Path) -> None:
        """Models and optimizers from a checkpoint; hyperparameters, schedules and all else stay as they are."""
        for name, model in self.models.items():
            saved = load_file(folder / f"{name}.safetensors")
            model.load_state_dict({key: saved[key] for key in model.state_dict()})
        numbers = json.loads((folder / "manifest.json").read_text())["state"]
        for name, optimizer in self.optimizers.items():
            saved = load_file(folder / f"{name}.safetensors") | numbers[name].get("numbers", {})
            for parameter, state in optimizer.state.items():
                for key in state:
                    value = saved.get(f"{self.names[id(parameter)]}/{key}")
                    if isinstance(value, torch.Tensor):
                        state[key].copy_(value)
                    elif value is not None:
                        state[key] = value

    def _before_forward(self, model, args, kwargs) -> None:
        """The size and norm of each sample that the first model is given in a micro-batch."""
        if self.step is None or not self.step["samples"] or self.step["samples"][-1]["inputs"] is not None:
            return
        sample = self.step["samples"][-1]
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(sample["indices"]):
                rows = value.detach().cpu().abs().double().reshape(len(value), -1 if len(value) else 0)
                sizes = torch.full((len(rows),), float(rows.shape[1]), dtype=torch.float64)
                sample["inputs"] = torch.stack([sizes, torch.linalg.vector_norm(rows, dim=1)], 1)
                return

    @contextlib.contextmanager
    def _record_gradients(self):
        """Around a backward pass: after it, record the gradients if they are complete."""
        yield
        if self.step is not None and self.accelerator.sync_gradients:
            for name, optimizer in self.optimizers.items():
                self.step["gradients"] |= self._gradients(name, optimizer)

    def _gradients(self, name: str, optimizer) -> dict[str, torch.Tensor]:
        return {
            f"{name}: {self.names[id(parameter)]}": sampled(parameter.grad)
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        }

    def _before_optimizer(self, name, optimizer, *_) -> None:
        if self.step is None:
            return
        calls, rates = self.step["optimizer_calls"], self.step["learning_rates"]
        calls[name] = calls.get(name, 0) + 1
        for number, group in enumerate(optimizer.param_groups):
            rates[f"{name}, group {number}" if number else name] = float(group["lr"])
        self.step["at_step"] |= self._gradients(name, optimizer)

    def end_step(self, is_last: bool) -> None:
        """After the script is done with a step, before anything is saved or tested; after the last one, write."""
        self.step["weights"] = {
            f"{owner}: {name}": sampled(tensor)
            for owner, model in self.models.items()
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }
        self.step["optimizer"] = {
            f"{owner}: {self.names[id(parameter)]}/{name}": sampled(tensor)
            for owner, optimizer in self.optimizers.items()
            for parameter, state in optimizer.state.items()
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }
        self.steps.append(self.step)
        self.step = None
        self.has_ended = is_last
        if is_last:
            self.write()

    def new_pass(self) -> list:
        """Where a pass over the test set is recorded. A test may have several, for a model and its average."""
        self.passes.append([])
        return self.passes[-1]

    def end_test(self, steps_done: int, result: dict) -> None:
        numbers = {name: float(v) for name, v in result.items() if isinstance(v, (int, float, torch.Tensor))}
        self.tests.append({"step": steps_done, "passes": self.passes, "result": numbers})
        self.passes = []
        if self.has_ended:
            self.write()

    def write(self) -> None:
        content = {"steps": self.steps, "tests": self.tests, "unsaved": self._unsaved_parameters()}
        modules = (module for model in self.models.values() for module in model.modules())
        content["modules"] = sorted({type(module).__name__ for module in modules})
        torch.save(content, Path(self.settings.folder) / f"record_rank{self.accelerator.process_index}.pt")

    def _unsaved_parameters(self) -> list[str]:
        """Names of the parameters that an optimizer trains and that no checkpoint has."""
        saved = {tensor.data_ptr() for part in self.checkpoint.values() for tensor in tensors_in(part.state_dict())}
        return [
            self.names[id(parameter)]
            for optimizer in self.optimizers.values()
            for parameter in parameters_of(optimizer)
            if parameter.data_ptr() not in saved
        ]


@contextlib.contextmanager
def recording(settings: Settings):
    """While it lasts, whoever imports make_accelerator, GlobalLoader or Run gets one that records."""
    make_accelerator = launch.make_accelerator

    def make(args, cpu_threads=None, *others, **options):
        settings.apply(args)
        # A different number of threads adds in a different order.
        return make_accelerator(args, cpu_threads or 1, *others, **options)

    parts = {"GlobalLoader": RecordingLoader, "Run": RecordingRun}
    parts = {name: type(name, (part,), {"settings": settings}) for name, part in parts.items()}
    with (
        mock.patch.object(launch, "make_accelerator", functools.wraps(make_accelerator)(make)),
        mock.patch.object(loader, "GlobalLoader", parts["GlobalLoader"]),
        mock.patch.object(run, "Run", parts["Run"]),
    ):
        yield


def main() -> None:
    settings, script, *flags = sys.argv[1:]
    settings = Settings(**json.loads(Path(settings).read_text()))
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).resolve().parent)
    with recording(settings):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
