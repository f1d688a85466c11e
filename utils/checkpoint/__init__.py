"""Checkpoints that are whole or not there, verified before use, and readable on any topology.

checkpoints/step_00000938/
    <name>.safetensors      of each model: parameters and buffers by their plain names
                            of each optimizer: its state as <parameter name>/<state name>
                            of any other object: the tensors of its state_dict
    <name>.rank_1.safetensors, ...  what only rank 1 has: its rows of a sharded model, its stage of a pipeline
    manifest.json           written last: step, what must be the same when resuming, everything that is not a tensor,
                            SHA-256 of each file

This file: when a run saves. state.py: how objects become tensors and JSON. folder.py: files on the disk.
reading.py: what a resumed run does.
"""

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
from accelerate.utils import DistributedType, gather_object
from torch import distributed, nn

from ..agree import on_main
from ..atomic_files import write_atomically
from ..console import Stop, show_error, stop
from ..parallel.shards import is_sharded, plain_name
from . import folder as disk
from .state import ModelState, ObjectState, OptimizerState, files_to_write, name_parameters, tensor_parts


class Checkpoints:
    """The checkpoints of one run. Each tensor, or part of it, is written by the first rank that has it.

    Args:
        state: by name, whatever has a state_dict, as `prepare` returned it.
        facts: what must be the same when resuming, by kind: "flags", "data", ... A checkpoint with others is refused,
            and one of different models, optimizers, settings of schedules or precision. "total_steps" may change where
            no setting of a schedule depends on it.
        keep: how many of the newest checkpoints to keep; 0: all.
    """

    numbers = itertools.count()  # counts this process's saves; the same on every rank, so it can name one

    def __init__(self, accelerator: Accelerator, folder: Path, state: dict, facts: dict, keep: int = 2):
        self.accelerator, self.folder, self.facts, self.keep = accelerator, Path(folder), facts, keep
        self.timeout_s = accelerator.init_handler.timeout.total_seconds() if accelerator.init_handler else 600
        self.models, self.optimizers, self.objects = {}, {}, {}
        if accelerator.scaler is not None:
            state = {**state, "scaler": accelerator.scaler}
        for name, instance in state.items():  # without the wrappers of `prepare`
            if isinstance(instance, nn.Module):
                self.models[name] = accelerator.unwrap_model(instance, keep_torch_compile=False)
            elif isinstance(instance, (AcceleratedOptimizer, torch.optim.Optimizer)):
                self.optimizers[name] = getattr(instance, "optimizer", instance)
            else:
                self.objects[name] = instance.scheduler if isinstance(instance, AcceleratedScheduler) else instance
        names = self.names = name_parameters(self.models, self.optimizers)
        # Models first: after a test, FSDP has some whole parameters, which no optimizer knows. Asking for the state of
        # a model shards them again.
        self.entries = {name: ModelState(model) for name, model in self.models.items()}
        self.entries |= {name: OptimizerState(optimizer, names) for name, optimizer in self.optimizers.items()}
        self.entries |= {name: ObjectState(name, instance) for name, instance in self.objects.items()}
        self.must_match = self._must_match()
        is_sharded = accelerator.distributed_type == DistributedType.FSDP and accelerator.num_processes > 1
        self.is_split = is_sharded or self.must_match["models"] != {n: self.entries[n].must_match for n in self.models}
        self.saved_step = None
        self.writing: Future | None = None
        self.others: list[int] = []  # the ranks but 0 that write parts of it
        self.copies: disk.Files = {}  # the next checkpoint reuses their memory
        self.save_time_s = 0.0  # how long training waited

    def _must_match(self) -> dict:
        """All that must be the same when resuming, as JSON: `facts`, and what is known of each object. Collective."""
        known = {name: {} for name in self.entries}
        for others in gather_object([{name: entry.must_match for name, entry in self.entries.items()}]):
            for name in known:  # the stages of a pipeline have some of the parameters each
                known[name] |= others[name]
        kinds = {"total_steps": 0, **self.facts, "checkpoint": ", ".join(sorted(known))}
        kinds |= {"precision": self.accelerator.mixed_precision}
        kinds |= {"models": {name: known.pop(name) for name in self.models}, "state": known}
        return json.loads(json.dumps(kinds, default=str))  # tuples become lists

    def save(self, step: int, run_state: dict, sync: Callable[[], None] | None = None) -> None:
        """Copy the state after `step` steps; a thread writes it to the disk. Collective.

        Args:
            run_state: JSON of the main process.
            sync: called first by the thread, to flush the files that `run_state` refers to.
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
        non_tensors = {name: state[name]["non_tensors"] for name in self.optimizers}
        by_rank = gather_object([(tensor_parts(tensors), non_tensors)])
        manifest = None
        if self.accelerator.is_main_process:
            for _, non_tensors in reversed(by_rank):  # the stages of a pipeline have some of the parameters each
                for name, saved in non_tensors.items():
                    state[name]["non_tensors"] = {**state[name]["non_tensors"], **saved}
            manifest = {
                "must_match": self.must_match,
                "num_processes": self.accelerator.num_processes,
                "torch": torch.__version__,
                "state": {name: saved for name, saved in state.items() if name not in self.models},
                "extra": run_state,
            }
        parts = [parts for parts, _ in by_rank]
        shares = [own.difference(*parts[:rank]) for rank, own in enumerate(parts)]  # the first rank that has one
        self._start_writing(step, tensors, shares, manifest, sync)
        self.save_time_s += time.perf_counter() - began

    def _start_writing(self, step: int, tensors: disk.Files, shares: list[set], manifest: dict | None, sync) -> None:
        """Copy this process's share of the tensors, if it has one; a thread writes it to the disk."""
        rank, name_of_save = self.accelerator.process_index, f"checkpoint/{next(self.numbers)}"
        self.others = others = [other for other in range(1, len(shares)) if shares[other]]
        if rank > 0 and rank not in others:
            return
        files = files_to_write(tensors, shares[rank], rank)
        self.copies = {file: disk.copy_to_cpu(content, self.copies.get(file, {})) for file, content in files.items()}
        messages = disk.SaveMessages(name_of_save, others, self.timeout_s) if others else None
        self.writing = Future()
        # Not a daemon: the interpreter waits for it at its end.
        arguments = self.writing, step, manifest, messages, sync
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self.thread.start()

    def _write(self, writing: Future, step: int, manifest: dict | None, messages, sync) -> None:
        """Runs in the thread."""
        rank = self.accelerator.process_index
        path = self.folder / f"step_{step:08d}"
        try:
            self._check_finite(step)
            if rank == 0:
                if sync is not None:
                    sync()
                disk.write_checkpoint(path, {"step": step, **manifest}, self.copies, self.keep, messages)
            else:
                disk.write_rank_files(path, self.copies, messages, rank)
            writing.set_result(None)
        except BaseException as error:
            problem = str(error)
            if isinstance(error, OSError):
                problem = f"{path} cannot be written ({error.strerror})"
                problem += ": --resume goes on from the checkpoint before it, if any"
            if rank == 0 and problem and isinstance(error, (OSError, disk.CheckpointError)):
                show_error(problem)
                error = Stop(problem)
            writing.set_exception(error)
            if messages is not None and not isinstance(error, distributed.DistError):  # the store is gone
                messages.post(rank, problem)

    def _check_finite(self, step: int) -> None:
        for file, tensors in self.copies.items():
            owner = re.sub(disk.RANK, "", file).removesuffix(".safetensors")
            if owner not in self.models:
                continue
            buffers = {plain_name(name) for name, _ in self.models[owner].named_buffers()}  # masks may be infinite
            for name, tensor in tensors.items():
                if name not in buffers and not tensor.isfinite().all():
                    raise disk.CheckpointError(
                        f"{owner}.{name} is not finite after step {step}, which is not saved: "
                        "train with a smaller learning rate, or clip the gradients"
                    )

    def failed(self) -> bool:
        """Whether this process could not write the last checkpoint; the others do not know yet."""
        return self.writing is not None and self.writing.done() and bool(self.writing.exception())

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; on every rank, stop if it failed. Collective."""
        writing, self.writing = self.writing, None
        if self.others:  # else rank 0 would wait for the part of a process that is lost
            if writing is not None and self.accelerator.process_index > 0:
                self.thread.join()
            self.accelerator.wait_for_everyone()
        if writing is not None:
            self.thread.join()  # it may still hold the folder of the run
        on_main(self.accelerator, lambda: writing and writing.result())

    def load(self) -> tuple[int, dict]:
        """Load the newest whole checkpoint, also on a different number of processes. Collective.

        Returns:
            Its step and its run_state; (0, {}) where there is none.
        """
        has_some = on_main(self.accelerator, lambda: disk.has_checkpoint(self.folder))
        seen, is_split = zip(*gather_object([(self.folder.parent.exists(), self.is_split)]), strict=True)
        if any(is_split) and not all(seen):
            stop(f"rank {seen.index(False)} does not see {self.folder.parent}: {disk.NEED_ONE_FOLDER}")
        if not has_some:
            return 0, {}
        from .reading import load_newest

        self.saved_step, run_state = load_newest(self)
        return self.saved_step, run_state


def save_model(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Write a model from `prepare` by plain names: loads with strict=True into the bare nn.Module. Collective.

    The tensors of a sharded model, or of other stages of a pipeline, are gathered one at a time.
    """
    tensors, _ = ModelState(accelerator.unwrap_model(model, keep_torch_compile=False)).save()
    owners, shapes = {}, {}
    on_meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    for rank, others in reversed([*enumerate(gather_object([on_meta]))]):
        owners |= dict.fromkeys(others, rank)
        shapes |= others
    header = disk.make_header(shapes)

    def whole_tensors():
        for name in header:
            tensor = tensors.get(name)
            if owners[name] > 0:
                received = torch.empty_like(shapes[name], device=accelerator.device)
                if accelerator.process_index == owners[name]:
                    received.copy_(tensor)
                distributed.broadcast(received.flatten().view(torch.uint8), owners[name])  # backends lack some dtypes
                tensor = received
            yield tensor.full_tensor() if is_sharded(tensor) else tensor  # collective

    whole = whole_tensors()

    def write():
        try:
            write_atomically(path, lambda part: disk.write_tensors(part, header, whole))
        finally:
            for _ in whole:  # collective
                pass

    if not accelerator.is_main_process:
        for _ in whole:
            pass
    on_main(accelerator, write)
