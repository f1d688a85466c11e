"""Checkpoints that are whole or not there, verified before they are used, and readable on any topology.

checkpoints/step_00000938/
    model.safetensors       parameters and buffers by their plain names
    optimizer.safetensors   optimizer state as <parameter name>/<state name>
    processes.safetensors   by rank: random states, and statistics since the last log line
    ema.safetensors         where a moving average of the model is kept: its state
    manifest.json           written last: step, what must match, scalar state, SHA-256 of each file
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from utils import show, stop

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "processes.safetensors")
# Whole tensors by plain names, whatever wraps or shards the model; sharded ones are gathered on rank 0 alone.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# What this process holds, where the model is split by names over processes or devices.
PART = StateDictOptions(cpu_offload=True)


# Arguments that may change between a run and its resume: they decide where and how fast, or stand in the facts.
FREE = {"output_dir", "resume", "dataset", "num_epochs", "max_steps", "gradient_accumulation_steps", "num_workers"}
FREE |= {"checkpoint_every", "keep_checkpoints", "log_every", "log_with", "profile", "predict"}
FREE |= {"timeout_s", "micro_batch_size", "cpu_memory_gib", "compare"}
FREE |= {"num_stages", "num_microbatches", "schedule", "split", "balance", "cpu_threads"}


def on_main(accelerator: Accelerator, work: Callable):
    """`work()` on the main process, its result on all. A failure ends all processes: none is left waiting."""
    result = problem = None
    if accelerator.is_main_process:
        try:
            result = work()
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror or error}"
        except SystemExit as error:  # work() already said why
            problem = error
    result, problem = broadcast_object_list([result, problem])
    if isinstance(problem, SystemExit):
        raise problem
    if problem:
        stop(problem)
    return result


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder safe on the disk: fsync of a file does not cover its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> str:
    """Write a file through to the disk; returns its SHA-256."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def save_model(accelerator: Accelerator, model: torch.nn.Module, path: Path, copy: int | None = None) -> None:
    """The whole model by plain parameter names: loads with strict=True into the bare nn.Module. A collective.

    copy: as in `Checkpoints`.
    """
    state, _ = whole_state(accelerator, model, None, copy)

    def write():
        part = path.with_name(path.name + ".part")
        write_synced(part, safetensors.torch.save(contiguous(state)))
        part.replace(path)
        fsync_folder(path.parent)

    on_main(accelerator, write)


def load_pretrained(model: torch.nn.Module, source: str, head: str) -> None:
    """Copy weights from a file, or from the URL of one, into the bare model.

    head: name of the last layer, which keeps what it has if the weights are of another number of classes.
    Raises: SystemExit if they are not there, or not of this model.
    """
    try:
        if source.startswith("https://"):
            state = torch.hub.load_state_dict_from_url(source, map_location="cpu", weights_only=True, check_hash=True)
        elif source.endswith(".safetensors"):
            state = safetensors.torch.load_file(source)
        else:
            state = torch.load(source, map_location="cpu", weights_only=True)
        own = {f"{head}.{name}": tensor for name, tensor in model.get_submodule(head).state_dict().items()}
        if any(state[name].shape != tensor.shape for name, tensor in own.items()):
            state |= own
        model.load_state_dict(state)
    except Exception as error:  # no network, file, format, name: there are no such weights
        stop(f"--pretrained {source} cannot be read, or is of another model: {str(error).splitlines()[0]}")


def whole_state(accelerator: Accelerator, model, optimizer, copy: int | None) -> tuple[dict, dict]:
    """The states of model and optimizer (or None) by plain names, whole on the main process. A collective."""
    options = WHOLE if copy is None else PART
    model = accelerator.unwrap_model(model)  # torch's functions know the names below DDP, not DataParallel
    model_state, optimizer_state = get_model_state_dict(model, options=options), {}
    if optimizer is not None:
        optimizer_state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    if copy is None or accelerator.num_processes == 1:
        return model_state, optimizer_state
    parts = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object((model_state, optimizer_state) if copy == 0 else None, parts)
    for other_model, other_optimizer in filter(None, (parts or [])[1:]):
        model_state |= other_model
        if optimizer is not None:
            optimizer_state["state"] |= other_optimizer["state"]
            groups = zip(optimizer_state["param_groups"], other_optimizer["param_groups"], strict=True)
            for group, other in groups:
                group["params"] += other["params"]
    return model_state, optimizer_state


def contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def lay_out_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the strides of its parameter, as it had them before it was saved.

    A fused optimizer step goes through the memory of both side by side and looks at no strides: after a load, a weight
    with channels last would get the momentum of other weights.
    """
    for parameter, state in optimizer.state.items():
        for name, tensor in state.items():
            if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_checkpoint(path: Path) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """The manifest, and the tensors of each file. Raises: ValueError, naming the file that is missing or damaged."""
    name = "manifest.json"
    try:
        manifest = json.loads((path / name).read_bytes())
        if manifest.pop("checksum") != checksum(manifest) or manifest["format"] != FORMAT:
            raise ValueError(f"its checksum differs, or its format is not {FORMAT}")
        tensors = {}
        for name in manifest["sha256"]:
            content = (path / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != manifest["sha256"][name]:
                raise ValueError("its SHA-256 is not the one in manifest.json")
            tensors[name] = safetensors.torch.load(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{name}: {error}") from error
    return manifest, tensors


class Checkpoints:
    """The checkpoints of one run: `save` and `load` are collectives, and the main process alone touches the disk.

    Saved with each are the arguments, and `facts`: what else decides the numbers (data fingerprint, total steps, ...).
    A checkpoint in which one of them differs is refused, except for FREE ones: going on from it would be neither the
    old run nor a new one.

    copy: None where each process has the model (whole or, under FSDP, in shards of each tensor). Where each has some of
    the parameters instead, under the names of the whole model: which copy of the model these are of. Copy 0 is saved.
    """

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace, facts: dict, copy: int | None = None):
        self.accelerator, self.keep, self.copy = accelerator, args.keep_checkpoints, copy
        must_match = {name: value for name, value in vars(args).items() if name not in FREE} | facts
        self.must_match = json.loads(json.dumps(must_match))  # as it will be read back: tuples become lists
        self.folder = Path(args.output_dir) / "checkpoints"
        self.save_time_s = 0.0  # in which training waited

    def save(self, step, model, optimizer, scheduler, stats: dict[str, torch.Tensor], extra: dict, ema=None) -> None:
        """Save after `step` updates. stats: this process's tensors; extra: JSON, the main process's counts; ema: a
        module that is alike on all processes, such as torch.optim.swa_utils.AveragedModel.

        The folder gets its name when all in it is on the disk, and older ones are removed after that: at no moment is
        there less than the last whole checkpoint. Raises: SystemExit on all ranks if it cannot be written.
        """
        began = time.perf_counter()
        final = self.folder / f"step_{step:08d}"
        if on_main(self.accelerator, final.exists):  # a run that was resumed here, and stopped before its first update
            return
        model_state, optimizer_state = whole_state(self.accelerator, model, optimizer, self.copy)
        by_rank = gather_object([{**stats, **random_states(self.accelerator)}])

        def write():
            optimizer_tensors = {
                f"{parameter}/{name}": tensor
                for parameter, state in optimizer_state["state"].items()
                for name, tensor in state.items()
            }
            process_tensors = {
                f"{rank}/{name}": tensor for rank, tensors in enumerate(by_rank) for name, tensor in tensors.items()
            }
            contents = dict(zip(FILES, (model_state, optimizer_tensors, process_tensors), strict=True))
            if ema is not None:
                contents["ema.safetensors"] = ema.state_dict()
            scaler = self.accelerator.scaler
            manifest = {
                "format": FORMAT,
                "step": step,
                "must_match": self.must_match,
                "num_processes": self.accelerator.num_processes,
                "torch": torch.__version__,
                "optimizer": optimizer_state["param_groups"],
                "scheduler": scheduler.scheduler.state_dict(),  # .scheduler, .optimizer: what `prepare` wrapped
                "scaler": scaler.state_dict() if scaler is not None else None,
                "extra": extra,
            }
            part = self.folder / f".part_{final.name}"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            try:
                manifest["sha256"] = {
                    name: write_synced(part / name, safetensors.torch.save(contiguous(tensors)))
                    for name, tensors in contents.items()
                }
                manifest["checksum"] = checksum(manifest)
                write_synced(part / "manifest.json", json.dumps(manifest, indent=1).encode())
                fsync_folder(part)
                part.rename(final)
                fsync_folder(self.folder)
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                left = self.complete_steps()
                stop(
                    f"the checkpoint of step {step} cannot be written to {self.folder} ({error.strerror}); "
                    + (f"the one of step {left[0]} is whole, --resume goes on from it" if left else "there is none yet")
                )
            for old in self.complete_steps()[self.keep or None :] if self.keep else []:
                shutil.rmtree(self.folder / f"step_{old:08d}")

        on_main(self.accelerator, write)
        self.save_time_s += time.perf_counter() - began

    def complete_steps(self) -> list[int]:
        """The steps of the checkpoints here, newest first, by number: as text 100000000 is below 99999999."""
        names = [path.name.removeprefix("step_") for path in self.folder.glob("step_*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def load(self, model, optimizer, scheduler, ema=None) -> tuple[int, dict, dict[str, torch.Tensor]]:
        """Load the newest whole checkpoint: (step, extra, this process's stats); (0, {}, {}) where there is none.

        Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*. Other numbers of
        processes read it as well; then the random states, which belong to a process, are left as they are, and the
        first process takes all statistics.
        Raises: SystemExit on all ranks if none is whole though there are some, or if `must_match` differs.
        """
        found = on_main(self.accelerator, self._read_newest)
        if found is None:
            return 0, {}, {}
        manifest, tensors = found
        optimizer_state = {"state": {}, "param_groups": manifest["optimizer"]}
        for name, tensor in tensors["optimizer.safetensors"].items():
            parameter, _, state_name = name.rpartition("/")
            optimizer_state["state"].setdefault(parameter, {})[state_name] = tensor
        model = self.accelerator.unwrap_model(model)
        model_state, options = tensors["model.safetensors"], WHOLE if self.copy is None else PART
        if self.copy is not None:
            own = model.state_dict().keys()
            model_state = {name: tensor for name, tensor in model_state.items() if name in own}
            optimizer_state["state"] = {name: state for name, state in optimizer_state["state"].items() if name in own}
            for group in optimizer_state["param_groups"]:
                group["params"] = [name for name in group["params"] if name in own]
        set_model_state_dict(model, model_state, options=options)
        if optimizer_state["state"]:
            set_optimizer_state_dict(model, optimizer.optimizer, optimizer_state, options=options)
            lay_out_like_parameters(optimizer.optimizer)
        else:  # plain SGD has none, and torch's function then fails
            for group, saved in zip(optimizer.param_groups, manifest["optimizer"], strict=True):
                group.update({name: value for name, value in saved.items() if name != "params"})
        scheduler.scheduler.load_state_dict(manifest["scheduler"])
        if ema is not None:
            ema.load_state_dict(tensors["ema.safetensors"])
        if self.accelerator.scaler is not None and manifest["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(manifest["scaler"])
        return manifest["step"], manifest["extra"], self._own_part(manifest, tensors["processes.safetensors"])

    def _read_newest(self) -> tuple[dict, dict[str, dict[str, torch.Tensor]]] | None:
        for part in self.folder.glob(".part_*"):  # what a kill in the middle of a save left
            shutil.rmtree(part, ignore_errors=True)
        steps, damaged = self.complete_steps(), []
        for step in steps:
            path = self.folder / f"step_{step:08d}"
            try:
                manifest, tensors = read_checkpoint(path)
            except ValueError as error:
                show(f"warning: {path} is skipped: {error}", "yellow")
                damaged.append(path)
                continue
            self._compare(manifest["must_match"])
            for other in damaged:  # its name will be needed again
                shutil.rmtree(other.with_name(f"damaged_{other.name}"), ignore_errors=True)
                other.rename(other.with_name(f"damaged_{other.name}"))
            return manifest, tensors
        if steps:
            stop(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: start anew with another --output_dir"
            )
        return None

    def _compare(self, saved: dict) -> None:
        differ = [
            f"{name} was {saved.get(name)!r} and is {self.must_match.get(name)!r}"
            for name in sorted(saved.keys() | self.must_match.keys())
            if saved.get(name) != self.must_match.get(name)
        ]
        if differ:
            stop(f"the run in {self.folder.parent} cannot be resumed with other arguments: {'; '.join(differ)}")

    def _own_part(self, manifest: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_rank = [{} for _ in range(manifest["num_processes"])]
        for key, tensor in tensors.items():
            rank, name = key.split("/")
            by_rank[int(rank)][name] = tensor
        rank = self.accelerator.process_index
        if len(by_rank) == self.accelerator.num_processes:
            set_random_states(self.accelerator, by_rank[rank])
        elif rank == 0:  # another topology: one process takes over what all of them had counted
            by_rank[0] = {
                name: torch.cat([tensors[name] for tensors in by_rank if name in tensors])
                for name in sorted({name for tensors in by_rank for name in tensors if not name.startswith("random_")})
            }
        else:
            return {}
        return {name: tensor for name, tensor in by_rank[rank].items() if not name.startswith("random_")}


def random_states(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The states of torch's generators, uint8. Nothing here draws from them after the start; what you add may."""
    states = {"random_cpu": torch.get_rng_state()}
    if accelerator.device.type == "cuda":
        states["random_cuda"] = torch.cuda.get_rng_state(accelerator.device)
    return states


def set_random_states(accelerator: Accelerator, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["random_cpu"])
    if accelerator.device.type == "cuda" and "random_cuda" in states:
        torch.cuda.set_rng_state(states["random_cuda"], accelerator.device)
