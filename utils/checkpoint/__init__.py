"""Checkpoints that are whole or not there, verified before use, and readable on any topology.

checkpoints/step_00000938/
    <name>.safetensors      of each model: parameters and buffers by their plain names
                            of each optimizer: its state as <parameter name>/<state name>
                            of any other object: the tensors of its state_dict
    processes.safetensors   by rank: random states, and metrics since the last log line
    manifest.json           written last: step, what must match on resume, all that is not a tensor,
                            SHA-256 of each file

Here is what happens when a run saves and resumes. What a model, an optimizer and any other object is
on the disk stands in state.py; what belongs to one process, in processes.py; how files get there
whole, in folder.py.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object
from torch import nn

from ..atomic_files import fsync_folder, remove
from ..console import stop
from ..features import feature, has
from .folder import (
    FORMAT,
    PROCESSES,
    Tensors,
    checkpoint_path,
    copy_to_cpu,
    read_checkpoint,
    read_newest,
    remove_old,
    write_checkpoint,
    write_tensors,
)
from .processes import on_main, random_states, restore_process
from .state import (
    differences,
    invariants,
    join_parts,
    load_model,
    load_object,
    load_optimizer,
    model_state,
    name_parameters,
    optimizer_state,
    parameter_groups,
    plain_name,
    put_back_tensors,
    shapes,
    take_out_tensors,
)

__all__ = ["Checkpoints", "read_checkpoint", "save_model"]


class Checkpoints:
    """The checkpoints of one run. The main process alone touches the disk.

    Args:
        state: by name, whatever has a state_dict: models and optimizers as `prepare` returned them,
            schedules, moving averages, objects of your own.
        resume_invariants: what else decides the numbers (flags, data, total steps), as JSON. A
            checkpoint in which one of them differs is refused, and so is one with other classes or
            hyperparameters of optimizer and schedule, other parameters or another precision.
        keep: how many of the newest ones stay; 0: all of them.
        model_copy: for a model in parts on several processes; see features/pipeline.py.

    Raises:
        SystemExit: if something in `state` cannot be saved.
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
        of_state = {name: invariants(instance) for name, instance in {**self.optimizers, **self.objects}.items()}
        of_state["precision"] = accelerator.mixed_precision
        # As they will be read back: tuples become lists.
        self.invariants = json.loads(json.dumps({"fixed": resume_invariants, "derived": of_state}))
        self.saved_step = None
        self.writing: Future | None = None
        self.copies: Tensors = {}  # whose memory the next checkpoint takes
        self.save_time_s = 0.0  # in which training waited
        self.is_slow = False

    def _add(self, name: str, instance) -> None:
        """Put an entry of `state` where it belongs, without what `prepare` put around it."""
        if f"{name}.safetensors" == PROCESSES:
            stop(f"the name {name} is taken by the checkpoint itself: give that entry of the state another one")
        if isinstance(instance, nn.Module):
            self.models[name] = self.accelerator.unwrap_model(instance, keep_torch_compile=False)
        elif isinstance(instance, (AcceleratedOptimizer, torch.optim.Optimizer)):
            self.optimizers[name] = getattr(instance, "optimizer", instance)
        elif hasattr(instance, "state_dict") and hasattr(instance, "load_state_dict"):
            self.objects[name] = instance.scheduler if isinstance(instance, AcceleratedScheduler) else instance
            take_out_tensors(instance.state_dict(), {}, name)  # stops now, and not at the first checkpoint
        else:
            stop(f"{name} cannot be saved: a {type(instance).__name__} has no state_dict and load_state_dict")

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
            sync: called in the thread first, to flush what `extra` speaks of.

        Raises:
            SystemExit: on every rank, if the one before could not be written, or had a parameter that
                is not finite: each resume would end with it.
        """
        began = time.perf_counter()
        self.wait()
        if step == self.saved_step:  # a stop just after a checkpoint, or before the first step after a resume
            return
        self.saved_step = step
        tensors, state = self._collect()
        by_rank = gather_object([{**metrics, **random_states(self.accelerator)}])
        if self.accelerator.is_main_process:
            tensors[PROCESSES] = {
                f"{rank}/{name}": t for rank, saved in enumerate(by_rank) for name, t in saved.items()
            }
            self.copies = {file: copy_to_cpu(content, self.copies.get(file, {})) for file, content in tensors.items()}
            manifest = {
                "format": FORMAT,
                "step": step,
                **self.invariants,
                "num_processes": self.accelerator.num_processes,
                "torch": torch.__version__,
                "state": state,
                "extra": extra,
            }
            writer = ThreadPoolExecutor(1, "checkpoint")  # the interpreter waits for it at its end
            self.writing = writer.submit(self._write, manifest, sync)
            writer.shutdown(wait=False)  # the thread ends when it has written
        self.save_time_s += time.perf_counter() - began

    def _collect(self) -> tuple[Tensors, dict]:
        """The tensors of each file, and by name what is not a tensor; complete on the main process. Collective."""
        tensors, state = {}, {}
        # Models first: after a test FSDP has some whole parameters, which no optimizer knows, and
        # asking for the state of a model makes them shards again.
        for name, model in self.models.items():
            tensors[name] = self._join(model_state(self.accelerator, model))
        for name, optimizer in self.optimizers.items():
            found, state[name] = optimizer_state(
                self.accelerator, optimizer, self.parameter_names, self.models.values()
            )
            tensors[name] = self._join(found)
            for entry in ("numbers", "parameters"):
                state[name][entry] = self._join(state[name][entry])
        for name, instance in self.objects.items():
            found = {}
            state[name] = take_out_tensors(instance.state_dict(), found, name)
            if found:
                tensors[name] = found
        return {f"{name}.safetensors": found for name, found in tensors.items()}, state

    def _join(self, entries: dict) -> dict:
        return join_parts(self.accelerator, entries, self.model_copy)

    def _write(self, manifest: dict, sync: Callable[[], None] | None) -> None:
        """Write the copies as a checkpoint, in the thread, and then remove old ones."""
        began = time.perf_counter()
        self._check_finite(manifest["step"])
        if sync is not None:
            sync()
        write_checkpoint(self.folder, manifest, self.copies)
        if self.keep:
            remove_old(self.folder, self.keep)
        # A stop waits for the checkpoint under way, and then saves another one.
        if not self.is_slow and has("orphans"):
            self.is_slow = feature("orphans").warn_if_killed_sooner(2 * (time.perf_counter() - began))

    def _check_finite(self, step: int) -> None:
        """Stop if a parameter is not finite. Buffers may well be infinite, as masks are."""
        for model_name, model in self.models.items():
            buffers = {plain_name(name) for name, _ in model.named_buffers()}
            for name, tensor in self.copies[f"{model_name}.safetensors"].items():
                if name not in buffers and not tensor.isfinite().all():
                    stop(
                        f"{model_name}.{name} is not finite after step {step}, and no checkpoint of it is saved: "
                        "train with a smaller learning rate, or clip the gradients"
                    )

    def failed(self) -> bool:
        """Whether this process could not write the last checkpoint; the others do not know yet."""
        return self.writing is not None and self.writing.done() and bool(self.writing.exception())

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Collective.

        Raises:
            SystemExit: on every rank, if it cannot be written.
        """
        writing, self.writing = self.writing, None
        on_main(self.accelerator, lambda: writing and writing.result())

    # --- load ---------------------------------------------------------------------------------

    def load(self) -> tuple[int, dict, dict[str, torch.Tensor]]:
        """Load the newest whole checkpoint, also on a different number of processes. Collective.

        Returns:
            Its step, its extra, and this process's metrics; (0, {}, {}) where there is none.

        Raises:
            SystemExit: on every rank, if none is whole though there are some, or if it does not fit.
        """
        found = on_main(self.accelerator, lambda: read_newest(self.folder))
        if found is None:
            return 0, {}, {}
        manifest, tensors = found
        self._check_fits(manifest, tensors)
        for name, model in self.models.items():
            load_model(self.accelerator, model, tensors[f"{name}.safetensors"])
        for name in (*self.optimizers, *self.objects):
            saved, found = manifest["state"][name], tensors.get(f"{name}.safetensors", {})
            try:
                if name in self.objects:
                    load_object(self.objects[name], put_back_tensors(saved, found))
                else:
                    optimizer, models = self.optimizers[name], self.models.values()
                    load_optimizer(self.accelerator, optimizer, self.parameter_names, models, found, saved)
            except Exception as error:  # in another version of torch or of a class of the user's
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                stop(
                    f"{name} in {checkpoint_path(self.folder, manifest['step'])} cannot be loaded ({reason}): "
                    "remove that checkpoint to go on from the one before it"
                )
        self.saved_step = manifest["step"]
        metrics = restore_process(self.accelerator, tensors[PROCESSES], manifest["num_processes"])
        return manifest["step"], manifest["extra"], metrics

    def _check_fits(self, manifest: dict, tensors: Tensors) -> None:
        """Stop at the first difference; what the script said goes before what follows from it."""
        names = {*self.models, *self.optimizers, *self.objects}
        saved_names = {file.removesuffix(".safetensors") for file in tensors.keys() - {PROCESSES}}
        saved_names |= manifest["state"].keys()
        saved, current = ({"checkpoint": ", ".join(sorted(each))} for each in (saved_names, names))
        self._refuse(differences(saved, current))
        for kind in ("fixed", "derived"):
            self._refuse(differences(manifest[kind], self.invariants[kind]))
        saved, current = {}, {}
        for name, model in self.models.items():
            saved[name], current[name] = shapes(tensors[f"{name}.safetensors"]), shapes(model.state_dict())
        for name, optimizer in self.optimizers.items():
            current[name] = parameter_groups(optimizer, self.parameter_names)
            # Earlier versions wrote no list.
            saved[name] = manifest["state"][name].get("parameters", current[name])
        if self.model_copy is not None:  # this process has some of the parameters
            saved = {name: {entry: saved[name].get(entry) for entry in current[name]} for name in current}
        self._refuse(differences(saved, current))

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            shown = "; ".join(reasons[:5]) + f"; and {len(reasons) - 5} more" * (len(reasons) > 5)
            stop(f"the run in {self.folder.parent} cannot be resumed with other arguments: {shown}")


def save_model(accelerator: Accelerator, model: nn.Module, path: Path, model_copy: int | None = None) -> None:
    """Write a model by plain parameter names: loads with strict=True into the bare nn.Module. Collective.

    Args:
        model: as `prepare` returned it.
        model_copy: as in `Checkpoints`.
    """
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    state = join_parts(accelerator, model_state(accelerator, model), model_copy)

    def write():
        # In a folder of its own, for what safetensors leaves there when it is killed.
        part = path.with_name(f".part_{path.name}")
        remove(part)
        part.mkdir()
        write_tensors(part / path.name, copy_to_cpu(state, {}))
        (part / path.name).replace(path)
        fsync_folder(path.parent)
        remove(part)

    on_main(accelerator, write)
