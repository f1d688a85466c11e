"""Checkpoints that are whole or not there, verified before use, and readable on any topology.

checkpoints/step_00000938/
    <name>.safetensors      of each model: parameters and buffers by their plain names
                            of each optimizer: its state as <parameter name>/<state name>
                            of any other object: the tensors of its state_dict
                            of rank 0, if the model is sharded; the others' parts are <name>.rank_1.safetensors, ...
    processes.safetensors   by rank: metrics since the last log line
    manifest.json           written last: step, what must match when resuming, all that is not a tensor,
                            SHA-256 of each file

This file says when a run saves and loads; state.py, what an object is on the disk; folder.py, how files get there.
"""

import collections
import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import nn

from ..agree import on_main
from ..atomic_files import write_atomically
from ..console import show, show_error, stop
from .folder import (
    PROCESSES,
    RANK,
    Board,
    Files,
    Problem,
    Rows,
    Stored,
    StoredFiles,
    Tensors,
    copy_to_cpu,
    header_of,
    list_checkpoints,
    read_checkpoint,
    set_aside,
    write_checkpoint,
    write_part,
    write_tensors,
)
from .state import (
    ModelState,
    ObjectState,
    OptimizerState,
    differences,
    is_sharded,
    layout,
    name_parameters,
    own_files,
    plain_name,
)


class Checkpoints:
    """The checkpoints of one run. The main process writes them; of a sharded model, each process its own rows.

    Args:
        state: by name, whatever has a state_dict, as `prepare` returned it.
        invariants: what else decides the numbers (flags, data, total steps), as JSON. A checkpoint with
            different ones is refused; so are different models, optimizers, schedules and precisions.
        keep: how many of the newest checkpoints to keep; 0: all.
        model_parts: a parallel.pipeline.ModelParts, if the processes share the model.

    Raises:
        SystemExit: if something in `state` cannot be saved.
    """

    numbers = itertools.count()  # of all saves of this process: a name on all ranks

    def __init__(
        self, accelerator: Accelerator, folder: Path, state: dict, invariants: dict, keep: int = 2, model_parts=None
    ):
        self.accelerator, self.folder, self.keep, self.model_parts = accelerator, Path(folder), keep, model_parts
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP and accelerator.num_processes > 1
        self.timeout_s = accelerator.init_handler.timeout.total_seconds() if accelerator.init_handler else 600
        self.models, self.optimizers, objects = {}, {}, {}
        if accelerator.scaler is not None:
            state = {**state, "scaler": accelerator.scaler}
        for name, instance in state.items():  # without the wrappers of `prepare`
            file = f"{name}.safetensors"
            if not re.fullmatch(r"[\w.-]*\w", name) or file == PROCESSES or re.search(RANK, file):
                stop(f"{name!r} in the checkpoint is not a valid file name: use another, such as model")
            if isinstance(instance, nn.Module):
                self.models[name] = accelerator.unwrap_model(instance, keep_torch_compile=False)
            elif isinstance(instance, (AcceleratedOptimizer, torch.optim.Optimizer)):
                self.optimizers[name] = getattr(instance, "optimizer", instance)
            elif hasattr(instance, "state_dict") and hasattr(instance, "load_state_dict"):
                objects[name] = instance.scheduler if isinstance(instance, AcceleratedScheduler) else instance
            else:
                stop(f"{name} cannot be saved: a {type(instance).__name__} has no state_dict and load_state_dict")
        names = name_parameters(self.models, self.optimizers)
        # Models first: after a test, FSDP has some whole parameters, which no optimizer knows. Asking for the state of
        # a model shards them again.
        self.entries = {name: ModelState(model) for name, model in self.models.items()}
        self.entries |= {name: OptimizerState(optimizer, names) for name, optimizer in self.optimizers.items()}
        self.entries |= {name: ObjectState(name, instance) for name, instance in objects.items()}
        derived = {name: entry.settings for name, entry in self.entries.items() if name not in self.models}
        derived["precision"] = accelerator.mixed_precision
        # As they are read back: tuples become lists.
        self.invariants = json.loads(json.dumps({"fixed": invariants, "derived": derived}))
        self.saved_step = None
        self.writing: Future | None = None
        self.copies: Files = {}  # the next checkpoint reuses their memory
        self.rows: Rows = {}
        self.save_time_s = 0.0  # how long training waited

    def save(self, step: int, metrics: Tensors, extra: dict, sync: Callable[[], None] | None = None) -> None:
        """Copy the state after `step` steps into memory; a thread writes it to the disk. Collective.

        Args:
            metrics: this process's tensors.
            extra: JSON of the main process.
            sync: called by the thread first, to flush the files that `extra` counts on.

        Raises:
            SystemExit: on every rank, if the previous checkpoint could not be written, or had a parameter that is not
                finite.
        """
        began = time.perf_counter()
        self.wait()
        if step == self.saved_step:  # a stop just after a checkpoint, or before the first step after resuming
            return
        self.saved_step = step
        tensors, state = {}, {}
        for name, entry in self.entries.items():
            saved, state[name] = entry.save()
            if saved is not None:
                tensors[f"{name}.safetensors"] = saved
        if self.model_parts is not None:
            entries, copies = {"tensors": tensors, "state": state}, {"tensors": self.copies}
            tensors, state = self.model_parts.join(self.accelerator, entries, copies).values()
        by_rank = gather_object([metrics])
        is_main, manifest = self.accelerator.is_main_process, None
        if is_main:
            tensors[PROCESSES] = {f"{rank}/{name}": t for rank, own in enumerate(by_rank) for name, t in own.items()}
            manifest = {
                **self.invariants,
                "num_processes": self.accelerator.num_processes,
                "torch": torch.__version__,
                "state": {name: saved for name, saved in state.items() if name not in self.models},
                "extra": extra,
            }
        if is_main or self.is_sharded:
            files, self.rows = own_files(tensors, self.accelerator.process_index)
            self.copies = {file: copy_to_cpu(content, self.copies.get(file, {})) for file, content in files.items()}
            board = Board(f"checkpoint/{next(self.numbers)}", self.timeout_s) if self.is_sharded else None
            self.writing = Future()
            # Not a daemon: the interpreter waits for it at its end.
            arguments = self.writing, step, manifest, board, sync
            threading.Thread(target=self._write, args=arguments, name="checkpoint").start()
        self.save_time_s += time.perf_counter() - began

    def _write(self, writing: Future, step: int, manifest: dict | None, board: Board | None, sync) -> None:
        """Runs in the thread."""
        rank = self.accelerator.process_index
        path = self.folder / f"step_{step:08d}"
        try:
            self._check_finite(step)
            if rank == 0:
                if sync is not None:
                    sync()
                others = range(1, self.accelerator.num_processes if self.is_sharded else 1)
                write_checkpoint(path, {"step": step, **manifest}, self.copies, self.rows, self.keep, board, others)
            else:
                write_part(path, self.copies, self.rows, board, rank)
            writing.set_result(None)
        except BaseException as error:
            problem = str(error)
            if isinstance(error, OSError):
                problem = f"{path} cannot be written ({error.strerror})"
                problem += ": --resume goes on from the checkpoint before it, if any"
            if board is not None:
                board.tell(rank, problem)
            if rank == 0 and isinstance(error, (OSError, Problem)):
                show_error(problem)
                error = SystemExit(2)
            writing.set_exception(error)

    def _check_finite(self, step: int) -> None:
        for file, tensors in self.copies.items():
            owner = re.sub(RANK, "", file).removesuffix(".safetensors")
            if owner not in self.models:
                continue
            buffers = {plain_name(name) for name, _ in self.models[owner].named_buffers()}  # masks may be infinite
            for name, tensor in tensors.items():
                if name not in buffers and not tensor.isfinite().all():
                    raise Problem(
                        f"{owner}.{name} is not finite after step {step}, which is not saved: "
                        "train with a smaller learning rate, or clip the gradients"
                    )

    def failed(self) -> bool:
        """Whether this process could not write the last checkpoint; the others do not know yet."""
        return self.writing is not None and self.writing.done() and bool(self.writing.exception())

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; on every rank, stop if it failed. Collective."""
        writing, self.writing = self.writing, None
        on_main(self.accelerator, lambda: writing and writing.result())

    def load(self) -> tuple[int, dict, Tensors]:
        """Load the newest whole checkpoint, also on a different number of processes. Collective.

        Returns:
            Its step, its extra, and this process's metrics; (0, {}, {}) where there is none.

        Raises:
            SystemExit: on every rank, if there are checkpoints and none is whole, or if it does not fit.
        """
        newest = self._read_newest()
        if newest is None:
            return 0, {}, {}
        path, manifest, files = newest
        self._check_fits(manifest, files)
        for name, entry in self.entries.items():
            try:
                entry.load(files.pop(f"{name}.safetensors", {}), manifest["state"].get(name))
            except Exception as error:  # a different version of torch, or of a class in the script
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                stop(f"{name} in {path} cannot be loaded ({reason}): remove it to go on from the one before it")
        self.saved_step = manifest["step"]
        return manifest["step"], manifest["extra"], self._metrics(files[PROCESSES], manifest["num_processes"])

    def _read_newest(self) -> tuple[Path, dict, StoredFiles] | None:
        """The path, manifest and tensors of the newest whole checkpoint; None if there is none at all. Collective.

        Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*. All processes read
        the files of a sharded model, and each compares a part of them with their SHA-256.
        """
        accelerator = self.accelerator
        paths = on_main(accelerator, lambda: list_checkpoints(self.folder))
        share = slice(accelerator.process_index, None, accelerator.num_processes) if self.is_sharded else slice(None)
        for number, path in enumerate(paths):
            manifest, files, damage = {}, {}, None
            try:
                manifest, files = read_checkpoint(self.folder / path.name, share)
            except (OSError, ValueError) as error:
                damage = error
            found = gather_object([(manifest, damage)])
            damage = next((damage for _, damage in found[: None if self.is_sharded else 1] if damage), None)
            if isinstance(damage, OSError):
                stop(f"{damage.filename or path}: {damage.strerror or damage}")
            if damage is not None:
                if accelerator.is_main_process:
                    show(f"warning: {path} is skipped: {damage}", "yellow")
                continue
            on_main(accelerator, functools.partial(set_aside, paths[:number]))
            is_same = [other == found[0][0] for other, _ in found]
            if not all(is_same):  # a machine without this folder, or with a different one
                files = send_files(accelerator, files, is_same[accelerator.process_index])
            return path, found[0][0], files
        if paths:
            stop(
                f"none of the {len(paths)} checkpoints in {self.folder} is whole: start anew with another --output_dir"
            )
        return None

    def _metrics(self, tensors: dict[str, Stored], num_processes: int) -> Tensors:
        """The metrics this rank saved; with a different process count, rank 0 takes them all."""
        rank, same = self.accelerator.process_index, num_processes == self.accelerator.num_processes
        metrics = {}
        for key, tensor in tensors.items():
            saved_rank, _, name = key.partition("/")
            if rank == (int(saved_rank) if same else 0):
                metrics.setdefault(name, []).append(tensor.whole())
        return {name: torch.cat(parts) for name, parts in metrics.items()}

    def _check_fits(self, manifest: dict, tensors: StoredFiles) -> None:
        """Stop at the first kind of difference: the later ones follow from it."""
        files = {file.removesuffix(".safetensors") for file in tensors if file != PROCESSES}
        names = files | manifest["state"].keys()
        self._refuse(", ".join(sorted(names)), ", ".join(sorted(self.entries)), "checkpoint")
        for kind in ("fixed", "derived"):
            self._refuse(manifest[kind], self.invariants[kind])
        layouts = {name: layout(tensors[f"{name}.safetensors"]) for name in self.models}
        layouts |= {name: manifest["state"][name]["parameters"] for name in self.optimizers}
        for name, saved in layouts.items():
            now = self.entries[name].layout()
            if self.model_parts is not None:  # this process has some of the parameters
                saved = {parameter: saved.get(parameter) for parameter in now}
            self._refuse(saved, now, name)

    def _refuse(self, saved, now, name: str = "") -> None:
        """Stop if the two are different."""
        # Classes first: other differences follow from them.
        if reasons := sorted(differences(saved, now, name), key=lambda reason: ".class was " not in reason):
            shown = "; ".join(reasons[:5]) + f"; and {len(reasons) - 5} more" * (len(reasons) > 5)
            stop(f"the run in {self.folder.parent} cannot be resumed with different arguments: {shown}")


def save_model(accelerator: Accelerator, model: nn.Module, path: Path, model_parts=None) -> None:
    """Write a model from `prepare` by plain names: loads with strict=True into the bare nn.Module. Collective.

    A sharded model is gathered one tensor after the other.
    """
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    tensors, _ = ModelState(model).save()
    if model_parts is not None:
        tensors = model_parts.join(accelerator, tensors, {})
    header = header_of(tensors)
    parts = (tensors[name] for name in header)
    whole = (part.full_tensor() if is_sharded(part) else part for part in parts)  # collective

    def write():
        try:
            write_atomically(path, lambda part: write_tensors(part, header, whole))
        finally:
            collections.deque(whole, maxlen=0)

    if not accelerator.is_main_process:
        collections.deque(whole, maxlen=0)
    on_main(accelerator, write)


def send_files(accelerator: Accelerator, files: StoredFiles, has_files: bool) -> StoredFiles:
    """The main process's `files` for processes that have not the same, one tensor at a time. Collective."""
    shapes = {}
    for file, tensors in files.items():
        shapes[file] = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    (received,) = broadcast_object_list([shapes])
    for file, tensors in received.items():
        for name, shape in tensors.items():
            tensor = torch.empty_like(shape, device=accelerator.device)
            if accelerator.is_main_process:
                tensor.copy_(files[file][name].whole())
            torch.distributed.broadcast(tensor.flatten().view(torch.uint8), 0)  # backends lack some dtypes
            if not has_files:
                tensors[name] = Stored([(0, tensor.cpu())])
    return files if has_files else received
