"""Checkpoints that are whole or not there, verified before use, and readable on any topology.

checkpoints/step_00000938/
    <name>.safetensors      of each model: parameters and buffers by their plain names
                            of each optimizer: its state as <parameter name>/<state name>
                            of any other object: the tensors of its state_dict
    processes.safetensors   by rank: random states, and metrics since the last log line
    manifest.json           written last: step, what must match on resume, all that is not a tensor,
                            SHA-256 of each file

Here is what happens when a run saves and resumes. What a model, an optimizer and any other object
is on the disk stands in models.py, optimizers.py and objects.py; how files get there whole, in
folder.py and manifest.py; what belongs to one process, in processes.py.
"""

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object
from torch import nn

from ..atomic_files import read_entry
from ..console import show, stop
from ..signals import launchers_patience_s
from .folder import PROCESSES, checkpoint_path, copy_to_cpu, read_checkpoint, read_newest, remove_old, write_checkpoint
from .manifest import FORMAT, differences
from .models import check_finite, load_model, model_differences, model_state, save_model
from .objects import load_object, object_invariants, put_back_tensors, take_out_tensors
from .optimizers import load_optimizer, name_parameters, optimizer_invariants, optimizer_state, parameter_groups
from .processes import gather_first_copy, on_main, random_states, restore_process

__all__ = ["Checkpoints", "read_checkpoint", "save_model"]
NEITHER = "which is neither tensor nor JSON"


class Checkpoints:
    """The checkpoints of one run. `save`, `wait` and `load` are collective, and the main process alone
    touches the disk.

    Args:
        folder: where they are; made by the first one.
        state: by name, whatever has a state_dict: models and optimizers as `prepare` returned them,
            schedules, scalers, moving averages, objects of your own. All of it is saved in one step:
            no object is ever newer than another.
        resume_invariants: what else decides the numbers (flags, data, total steps), as JSON. A
            checkpoint in which one of them differs is refused, and so is one with other classes or
            hyperparameters of optimizer and schedule, other parameters or another precision: going
            on from it would be neither the old run nor a new one.
        keep: how many of the newest ones stay; 0: all of them.
        model_copy: None where each process has the whole model, or a shard of each tensor (FSDP).
            Where each process has some of the parameters instead, under the names of the whole
            model: the number of the copy of the model that these belong to. Copy 0 is saved.

    Raises:
        SystemExit: naming it, if something in `state` cannot be saved.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        state: dict,
        resume_invariants: dict,
        keep: int = 2,
        model_copy: int | None = None,
    ):
        self.accelerator, self.folder, self.keep, self.model_copy = accelerator, Path(folder), keep, model_copy
        self.models, self.optimizers, self.objects = {}, {}, {}
        if accelerator.scaler is not None:
            state = {**state, "scaler": accelerator.scaler}
        for name, instance in state.items():
            self._add(name, instance)
        self.parameter_names = name_parameters(self.models, self.optimizers)
        # Both as they will be read back: tuples become lists.
        self.resume_invariants = json.loads(json.dumps(resume_invariants))
        invariants = {"precision": accelerator.mixed_precision}
        invariants |= {name: optimizer_invariants(optimizer) for name, optimizer in self.optimizers.items()}
        invariants |= {name: object_invariants(instance) for name, instance in self.objects.items()}
        self.state_invariants = json.loads(json.dumps(invariants))
        self.writing: Future | None = None
        self.copies = {}  # of the tensors of each file, from one checkpoint to the next
        self.save_time_s = 0.0  # in which training waited
        self.is_slow = False

    def _add(self, name: str, instance) -> None:
        """Put an entry of `state` where it belongs, without what `prepare` put around it."""
        kind = type(instance).__name__
        if f"{name}.safetensors" == PROCESSES:
            stop(f"the name {name} is taken by the checkpoint itself: give that entry of the state another one")
        if isinstance(instance, nn.Module):
            self.models[name] = self.accelerator.unwrap_model(instance, keep_torch_compile=False)
        elif isinstance(instance, (AcceleratedOptimizer, torch.optim.Optimizer)):
            self.optimizers[name] = getattr(instance, "optimizer", instance)
        elif hasattr(instance, "state_dict") and hasattr(instance, "load_state_dict"):
            self.objects[name] = instance.scheduler if isinstance(instance, AcceleratedScheduler) else instance
            self._object_state(name)  # now, and not at the first checkpoint
        else:
            stop(f"{name}, a {kind}, cannot be saved: it has no state_dict and load_state_dict")

    # --- save ---------------------------------------------------------------------------------

    def save(
        self, step: int, metrics: dict[str, torch.Tensor], extra: dict, sync: Callable[[], None] | None = None
    ) -> None:
        """Copy the state after `step` steps into memory; a thread writes it to the disk. Collective.

        Older checkpoints are removed after that: at no moment is there less than the last whole one.
        Before it copies, it waits for the one before.

        Args:
            metrics: this process's tensors.
            extra: JSON, the main process's.
            sync: called in the thread before the checkpoint is whole, to flush what `extra` speaks of.

        Raises:
            SystemExit: on every rank, if the one before could not be written, or if a parameter is
                not finite: each resume would end with it.
        """
        began = time.perf_counter()
        self.wait()
        # A run that was resumed here, and stopped before its first step.
        if on_main(self.accelerator, checkpoint_path(self.folder, step).exists):
            return
        tensors, scalars = self._collect()
        by_rank = gather_object([{**metrics, **random_states(self.accelerator)}])

        def start_writing():
            check_finite(self.models, tensors, step)
            tensors[PROCESSES] = {
                f"{rank}/{name}": t for rank, saved in enumerate(by_rank) for name, t in saved.items()
            }
            self.copies = {name: copy_to_cpu(content, self.copies.get(name, {})) for name, content in tensors.items()}
            manifest = {
                "format": FORMAT,
                "step": step,
                "fixed": self.resume_invariants,
                "derived": self.state_invariants,
                "num_processes": self.accelerator.num_processes,
                "torch": torch.__version__,
                "state": scalars,
                "extra": extra,
            }
            writer = ThreadPoolExecutor(1, "checkpoint")  # the interpreter waits for it at its end
            self.writing = writer.submit(self._write, manifest, sync)
            writer.shutdown(wait=False)  # the thread ends when it has written

        on_main(self.accelerator, start_writing)
        self.save_time_s += time.perf_counter() - began

    def failed(self) -> bool:
        """Whether this process could not write the last checkpoint; the others do not know yet."""
        return self.writing is not None and self.writing.done() and bool(self.writing.exception())

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Collective.

        Raises:
            SystemExit: on every rank, if it cannot be written.
        """

        def result():
            if self.writing is not None:
                writing, self.writing = self.writing, None
                writing.result()

        on_main(self.accelerator, result)

    def _collect(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict]:
        """The tensors of each file, and by name what is not a tensor; complete on the main process. Collective."""
        tensors, scalars = {}, {}
        # Models first: after a test FSDP has some whole parameters, which no optimizer knows, and
        # asking for the state of a model makes them shards again.
        for name, model in self.models.items():
            tensors[name] = self._gather(model_state(model))
        for name, optimizer in self.optimizers.items():
            try:
                found, saved = optimizer_state(optimizer, self.parameter_names, self.models.values())
            except TypeError as error:
                stop(f"the optimizer {type(optimizer).__name__} cannot be saved: {error}, {NEITHER}")
            tensors[name] = self._gather(found)
            scalars[name] = saved | {entry: self._gather(saved[entry]) for entry in ("numbers", "parameters")}
        for name in self.objects:
            scalars[name], found = self._object_state(name)
            if found:
                tensors[name] = found
        return {f"{name}.safetensors": found for name, found in tensors.items()}, scalars

    def _gather(self, entries: dict) -> dict:
        return gather_first_copy(self.accelerator, self.model_copy, entries)

    def _object_state(self, name: str) -> tuple[object, dict[str, torch.Tensor]]:
        instance = self.objects[name]
        try:
            return take_out_tensors(instance.state_dict())
        except TypeError as error:
            stop(f"{name}, a {type(instance).__name__}, cannot be saved: {error}, {NEITHER}")

    def _write(self, manifest: dict, sync: Callable[[], None] | None) -> None:
        """Write the copies as a checkpoint, in the thread, and then remove old ones."""
        began = time.perf_counter()
        write_checkpoint(self.folder, manifest, self.copies, sync)
        if self.keep:
            remove_old(self.folder, self.keep)
        self.is_slow = self.is_slow or warn_if_slow(time.perf_counter() - began)

    # --- load ---------------------------------------------------------------------------------

    def load(self) -> tuple[int, dict, dict[str, torch.Tensor]]:
        """Load the newest whole checkpoint, also on a different number of processes. Collective.

        Returns:
            Its step, its extra, and this process's metrics; (0, {}, {}) where there is none.

        Raises:
            SystemExit: on every rank, if none is whole though there are some, if it is of another
                version, or if it does not fit this run.
        """
        found = on_main(self.accelerator, lambda: read_newest(self.folder, self._check_fits))
        if found is None:
            return 0, {}, {}
        manifest, tensors = found
        self._check_parameters(manifest, tensors)
        for name, model in self.models.items():
            load_model(model, tensors[f"{name}.safetensors"])
        for name in (*self.optimizers, *self.objects):
            found, saved = tensors.get(f"{name}.safetensors", {}), manifest["state"][name]
            try:
                if name in self.objects:
                    load_object(self.objects[name], put_back_tensors(saved, found))
                else:
                    load_optimizer(self.optimizers[name], self.parameter_names, self.models.values(), found, saved)
            except Exception as error:  # in another version of torch or of a class of the user's
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                stop(
                    f"{name} in {checkpoint_path(self.folder, manifest['step'])} cannot be loaded ({reason}): "
                    "remove that checkpoint to go on from the one before it"
                )
        metrics = restore_process(self.accelerator, tensors[PROCESSES], manifest["num_processes"])
        return manifest["step"], manifest["extra"], metrics

    def _check_fits(self, manifest: dict) -> None:
        """Compare what must match; what was said by the script goes before what follows from it.

        Raises:
            SystemExit: naming what differs.
        """
        names = {*self.models, *self.optimizers, *self.objects}
        saved_names = {file.removesuffix(".safetensors") for file in manifest["sha256"].keys() - {PROCESSES}}
        saved_names |= manifest["state"].keys()
        if names != saved_names:
            saved, current = (", ".join(sorted(each)) for each in (saved_names, names))
            refuse_if([f"the checkpoint has {saved}, and the run {current}"], self.folder.parent)
        refuse_if(differences(manifest["fixed"], self.resume_invariants), self.folder.parent)
        refuse_if(differences(manifest["derived"], self.state_invariants), self.folder.parent)

    def _check_parameters(self, manifest: dict, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        """Compare names, shapes and dtypes of the models, and which parameters each optimizer trains.

        Raises:
            SystemExit: naming what differs.
        """
        is_whole = self.model_copy is None
        for name, model in self.models.items():
            reasons = model_differences(model, tensors[f"{name}.safetensors"], is_whole)
            refuse_if([f"{name}.{reason}" for reason in reasons], self.folder.parent)
        for name, optimizer in self.optimizers.items():
            current = parameter_groups(optimizer, self.parameter_names)
            # Earlier versions wrote no list.
            saved = manifest["state"][name].get("parameters", current)
            if not is_whole:
                saved = {parameter: saved.get(parameter) for parameter in current}
            refuse_if(differences({name: saved}, {name: current}), self.folder.parent)


def refuse_if(reasons: list[str], folder: Path) -> None:
    """Raises: SystemExit: if there are reasons why the run in `folder` cannot be resumed."""
    if reasons:
        shown = "; ".join(reasons[:5]) + f"; and {len(reasons) - 5} more" * (len(reasons) > 5)
        stop(f"the run in {folder} cannot be resumed with other arguments: {shown}")


def warn_if_slow(write_time_s: float) -> bool:
    """Whether the launcher would kill the run before it has saved, and if so, say it.

    A stop waits for the checkpoint under way, and then saves another one.
    """
    patience_s = launchers_patience_s()
    if 2 * write_time_s < patience_s:
        return False
    needed_s = 4 * math.ceil(write_time_s)
    show(
        f"warning: a checkpoint takes {write_time_s:.0f} s, and {patience_s:.0f} s after a Ctrl-C or SIGTERM "
        "the launcher kills its processes, saved or not: start it with "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={needed_s} in the environment",
        "yellow",
    )
    return True


def read_trained(file: Path, *needed: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights that a finished run saved as `file`, and the arguments that it had.

    needed: names of weights without which it is no model of the script.
    Raises: SystemExit, in one sentence, if the file is not there, damaged, or of another script.
    """
    if not file.is_file():
        stop(f"--predict needs the --output_dir of a finished run: there is no {file}")
    try:
        weights = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        stop(f"{file} is damaged, or no model: {error}")
    missing = [name for name in needed if name not in weights]
    if missing:
        names = ", ".join(list(weights)[:5])
        stop(f"{file} is of another model: it has {names} and so on, and no {missing[0]}")
    return weights, read_entry(file.with_name("run.json"), "arguments", dict) or {}
