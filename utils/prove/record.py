"""What a run does, update by update, for `python -m utils.prove`: only if TRAIN_RECORD is set.

TRAIN_RECORD is a JSON object with the fields of `Settings`.
"""

import contextlib
import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

# A larger tensor is recorded by so many of its entries, evenly spaced, and its norm.
MAX_ENTRIES = 2**14


class Settings(NamedTuple):
    """How to run: short, over the end of an epoch, and on parts that are not all of one size."""

    folder: str  # of the run
    updates: int
    batch_size: int
    accumulation: int
    num_workers: int | None  # None: as the script says
    resume: bool
    float64: bool = False
    # A run of the same script: each update begins with the weights that this one had.
    weights_of: str | None = None

    @property
    def train_items(self) -> int:
        """Items of an epoch: three whole updates, and one of two items."""
        return 3 * self.batch_size + 2

    @property
    def test_items(self) -> int:
        return self.batch_size + self.batch_size // 2 - 1


@functools.cache
def settings() -> Settings | None:
    """What TRAIN_RECORD asks for; None if it is not set."""
    text = os.environ.get("TRAIN_RECORD")
    return Settings(**json.loads(text)) if text else None


def apply(args) -> None:
    """Set the arguments of a script as the settings say. Nothing without settings."""
    asked = settings()
    if asked is None:
        return
    if asked.float64:
        torch.set_default_dtype(torch.float64)
    if hasattr(args, "batch_size"):
        args.batch_size = asked.batch_size
    args.gradient_accumulation_steps = asked.accumulation
    args.output_dir = asked.folder
    args.resume = asked.resume
    args.checkpoint_every = 1
    args.keep_checkpoints = 0
    args.log_every = 1
    args.patience = 0
    args.profile = 0
    args.log_with = None


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as float64 on the CPU, flat: its norm, then its entries, or MAX_ENTRIES of them."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    flat = tensor.detach().flatten()
    norm = torch.linalg.vector_norm(flat.double()).view(1)
    step = max(1, flat.numel() // MAX_ENTRIES)
    return torch.cat([norm, flat[::step].double()]).cpu()


class Recorder:
    """Records one process's run, in record_rank<r>.pt."""

    def __init__(self, accelerator, checkpoints):
        self.accelerator = accelerator
        self.checkpoints = checkpoints  # knows the models, the optimizers and the names
        self.updates, self.tests = [], []
        self.current = None
        self.testing = None
        self.has_ended = False
        for name, optimizer in checkpoints.optimizers.items():
            optimizer.register_step_pre_hook(functools.partial(self._before_step, name))
        accelerator.around_backward.append(self._record_gradients)
        self.modules = sorted(
            {type(module).__name__ for model in checkpoints.models.values() for module in model.modules()}
        )

    def begin(self, batches: list, step: int) -> None:
        """Micro-batches that the script gets next, of the update after `step`."""
        for batch in batches:
            if batch.micro_step == 0:
                if settings().weights_of is not None and step > 0:
                    run = Path(settings().weights_of)
                    self.checkpoints.load_weights(run / "checkpoints" / f"step_{step:08d}")
                self.current = {"step": step + 1, "step_samples": batch.step_samples, "samples": []}
                self.current |= {"gradients": {}, "at_step": {}, "steps": {}, "learning_rates": {}}
            self.current["samples"].append({"indices": batch.indices.cpu(), "digests": batch.digests, "values": {}})

    def values(self, batch, values: dict[str, torch.Tensor]) -> None:
        """What the script counts for a micro-batch of training."""
        found = {name: value.detach().double().cpu() for name, value in values.items()}
        self.current["samples"][batch.micro_step]["values"] |= found

    @contextlib.contextmanager
    def _record_gradients(self):
        """Around a backward pass: after it, record the gradients if they are complete."""
        yield
        if self.current is not None and self.accelerator.sync_gradients:
            for name, optimizer in self.checkpoints.optimizers.items():
                self.current["gradients"] |= self._gradients(name, optimizer)

    def _gradients(self, name: str, optimizer) -> dict[str, torch.Tensor]:
        names = self.checkpoints.parameter_names
        return {
            f"{name}: {names[id(parameter)]}": sampled(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    def _before_step(self, name, optimizer, *_) -> None:
        if self.current is None:
            return
        self.current["steps"][name] = self.current["steps"].get(name, 0) + 1
        self.current["learning_rates"][name] = float(optimizer.param_groups[0]["lr"])
        self.current["at_step"] |= self._gradients(name, optimizer)

    def end_update(self, is_last: bool) -> None:
        """Call it after the update, before anything is saved or tested.

        is_last: the run ends with it; what is recorded is written from now on.
        """
        names = self.checkpoints.parameter_names
        self.current["weights"] = {
            f"{owner}: {name}": sampled(tensor)
            for owner, model in self.checkpoints.models.items()
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }
        self.current["optimizer"] = {
            f"{owner}: {names[id(parameter)]}/{name}": sampled(tensor)
            for owner, optimizer in self.checkpoints.optimizers.items()
            for parameter, state in optimizer.state.items()
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }
        self.updates.append(self.current)
        self.current = None
        self.has_ended = is_last
        if is_last:
            self.write()

    def test_values(self, batch, values: dict[str, torch.Tensor]) -> None:
        """What the script counts for a batch of the test."""
        if self.testing is None:
            self.testing = []
        found = {name: value.detach().double().cpu() for name, value in values.items()}
        self.testing.append({"indices": batch.indices.cpu(), "digests": batch.digests, "values": found})

    def end_test(self, step: int, result: dict) -> None:
        numbers = {name: float(v) for name, v in result.items() if isinstance(v, (int, float))}
        self.tests.append({"step": step, "samples": self.testing or [], "result": numbers})
        self.testing = None
        if self.has_ended:
            self.write()

    def write(self) -> None:
        content = {"updates": self.updates, "tests": self.tests, "modules": self.modules}
        content["unsaved"] = self.checkpoints.unsaved_parameters()
        rank = self.accelerator.process_index
        torch.save(content, Path(settings().folder) / f"record_rank{rank}.pt")
