"""Checkpoints that are whole or not there, verified before use, and readable on any topology.

checkpoints/step_00000938/
    <name>.safetensors      of each model: parameters and buffers by their plain names
                            of each optimizer: its state as <parameter name>/<state name>
                            of any other object: the tensors of its state_dict
    processes.safetensors   by rank: random states, and metrics since the last log line
    manifest.json           written last: step, what must match on resume, all that is no tensor,
                            SHA-256 of each file
"""

import contextlib
import errno
import hashlib
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from ..atomic_files import fsync_folder, read_entry, read_regular, remove, write_synced
from ..checkpoint.state import (
    copy_to_cpu,
    flat,
    join_parts,
    join_tensors,
    lay_out_like_parameters,
    plain_facts,
    random_states,
    savable,
    set_random_states,
    split_tensors,
    whole_model,
    without_progress,
    write_tensors,
)
from ..console import show, stop
from ..features.fsdp import full_state_options, is_sharded
from ..signals import launchers_patience_s

FORMAT = 2
PROCESSES = "processes.safetensors"
# How an optimizer computes its step, and not what it is: may change between a run and its resume.
IMPLEMENTATION = {"params", "fused", "foreach", "capturable"}
# State that torch's fused steps read side by side with the parameter.
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# What a manifest has, and of which type; and what `Run` has in its "extra".
ENTRIES = {
    "step": int,
    "fixed": dict,
    "derived": dict,
    "num_processes": int,
    "torch": str,
    "state": dict,
    "extra": dict,
    "sha256": dict,
}
EXTRA = {"metrics_bytes": int, "best": dict, "tests_since_best": int}
# What reading JSON of another form than expected can raise.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
# The file itself is at fault. Others, such as missing rights, may be over at the next start.
DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO}


def on_main(accelerator: Accelerator, work: Callable):
    """`work()` on the main process, its result on all of them. A failure ends every process: none
    is left waiting."""
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


def save_model(accelerator: Accelerator, model: nn.Module, path: Path, model_copy: int | None = None) -> None:
    """The whole model by plain parameter names: loads with strict=True into the bare nn.Module.
    Collective.

    model_copy: as in `Checkpoints`.
    """
    state = whole_model(accelerator, model)
    if model_copy is not None:
        state = join_parts(accelerator, model_copy, state)

    def write():
        # In a folder of its own, for what safetensors leaves there when it is killed.
        part = path.with_name(f".part_{path.name}")
        remove(part)
        part.mkdir()
        write_tensors(part / path.name, savable(state))
        (part / path.name).replace(path)
        fsync_folder(path.parent)
        remove(part)

    on_main(accelerator, write)


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


def load_pretrained(model: nn.Module, source: str, head: str) -> None:
    """Copy weights from a file, or from the URL of one, into the bare model.

    head: name of the last layer, which keeps what it has if the weights are of another number of
    classes.
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


def restore_hyperparameters(group: dict, saved: dict) -> None:
    """Set those of an optimizer's param_group to the ones in a checkpoint, in place."""
    for key, value in saved.items():
        # None where JSON has no word for a value, such as a function: the run's own one stays.
        if key in IMPLEMENTATION or value is None:
            continue
        if isinstance(group.get(key), (int, float)) and not isinstance(value, (int, float)):
            raise ValueError(f"its {key} is {value!r}")
        if isinstance(group.get(key), torch.Tensor):
            value = torch.full_like(group[key], value)
        group[key] = tuple(value) if isinstance(value, list) else value


def is_no_class(name: str) -> bool:
    return not name.endswith(".class")


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class OtherFormat(ValueError):
    """A checkpoint of another version of this module."""


def check_types(entries: dict, kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        if type(entries[name]) is not kind:
            raise ValueError(f"its {name} is {str(entries[name])[:50]}")


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint, validated: what reads it later need not look again.

    Raises: ValueError if it is missing or damaged, OtherFormat, OSError if it cannot be read now.
    """
    manifest = json.loads(read_regular(path / "manifest.json", psutil.virtual_memory().total))
    if manifest.pop("checksum") != checksum(manifest):
        raise ValueError("its checksum differs")
    if manifest["format"] != FORMAT:
        raise OtherFormat(manifest["format"])
    check_types(manifest, ENTRIES)
    extra = manifest["extra"]
    check_types(extra, {name: kind for name, kind in EXTRA.items() if name in extra})
    if path.name != f"step_{manifest['step']:08d}":
        raise ValueError(f"it is of step {manifest['step']}")
    for best in extra.get("best", {}).values():
        value, step = best
        if not isinstance(value, (int, float)) or type(step) is not int:
            raise ValueError(f"its best is {str(best)[:50]}")
    for name, digest in manifest["sha256"].items():
        if not re.fullmatch(r"[^/\0]+\.safetensors", name) or not isinstance(digest, str):
            raise ValueError(f"it has a file {name[:50]!r}")
    return manifest


def read_tensors(path: Path, digest: str) -> dict[str, torch.Tensor]:
    """The tensors of a file. Raises: ValueError if it is damaged, OSError if it cannot be read."""
    content = read_regular(path, psutil.virtual_memory().total)
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("its SHA-256 is not the one in manifest.json")
    return safetensors.torch.load(content)


def read_checkpoint(
    path: Path, check: Callable[[dict], None] | None = None
) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """The manifest, and the tensors of each file.

    check: called with the manifest before the tensors are read.
    Raises: ValueError, naming the file that is missing or damaged. OSError if a file cannot be read
    for another reason: it may be whole.
    """
    name = "manifest.json"
    try:
        manifest = read_manifest(path)
        if check is not None:
            check(manifest)
        tensors = {}
        for name, digest in manifest["sha256"].items():
            tensors[name] = read_tensors(path / name, digest)
        name = PROCESSES
        ranks = {key.partition("/")[0] for key in tensors[PROCESSES]}
        if len(ranks) != manifest["num_processes"] or ranks != set(map(str, range(len(ranks)))):
            raise ValueError(f"it is not of {manifest['num_processes']} processes")
    except OtherFormat:
        raise
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        raise ValueError(f"{name}: {error.strerror}") from error
    except (*MALFORMED, safetensors.SafetensorError) as error:
        raise ValueError(f"{name}: {error}") from error
    return manifest, tensors


class Checkpoints:
    """The checkpoints of one run. `save`, `wait` and `load` are collective, and the main process
    alone touches the disk.

    state: by name, whatever has a state_dict: models and optimizers as `prepare` returned them,
    schedules, scalers, moving averages, objects of your own. All of it is saved in one step: no
    part is ever newer than another.
    fixed: what else decides the numbers (flags, data, total steps), as JSON. A checkpoint in which
    something of it differs is refused, and so is one with other classes or hyperparameters of
    optimizer and schedule, other parameters or another precision: going on from it would be neither
    the old run nor a new one.
    keep: how many of the newest ones stay; 0: all of them.
    model_copy: None where each process has the whole model, or a shard of each tensor (FSDP). Where each
    process has some of the parameters instead, under the names of the whole model: the number of
    the copy of the model that these belong to. Copy 0 is saved.

    Raises: SystemExit, naming it, if something in `state` cannot be saved.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        state: dict,
        fixed: dict,
        keep: int = 2,
        model_copy: int | None = None,
    ):
        self.accelerator, self.folder, self.keep, self.model_copy = accelerator, Path(folder), keep, model_copy
        state = dict(state)
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        self.models, self.optimizers, self.others = {}, {}, {}
        for name, part in state.items():
            if isinstance(part, nn.Module):
                self.models[name] = accelerator.unwrap_model(part, keep_torch_compile=False)
            elif isinstance(part, (AcceleratedOptimizer, torch.optim.Optimizer)):
                self.optimizers[name] = getattr(part, "optimizer", part)
            elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                self.others[name] = part.scheduler if isinstance(part, AcceleratedScheduler) else part
            else:
                stop(f"{name}, a {type(part).__name__}, cannot be saved: it has no state_dict and load_state_dict")
            if f"{name}.safetensors" == PROCESSES:
                stop(f"the name {name} is taken by the checkpoint itself: give that part of the state another one")
        for name, part in self.others.items():
            try:
                split_tensors(part.state_dict())
            except TypeError as error:
                stop(f"{name}, a {type(part).__name__}, cannot be saved: {error}, which is neither tensor nor JSON")
        self.parameter_names = self._name_parameters()
        self.fixed = json.loads(json.dumps(fixed))  # as it will be read back: tuples become lists
        self.derived = json.loads(json.dumps(self._derive()))
        self.writing: Future | None = None
        self.copies = {}  # of the tensors of each file, from one checkpoint to the next
        self.save_time_s = 0.0  # in which training waited
        self.is_slow = False
        self.left = set()  # old checkpoints that cannot be removed

    def _name_parameters(self) -> dict[int, str]:
        """A name for each parameter, by id: plain if there is one model, else with the model's name
        before it.

        A model that no optimizer has parameters of, such as a moving average, does not count.
        """
        trained = {id(p) for opt in self.optimizers.values() for group in opt.param_groups for p in group["params"]}
        owners = {
            name: model for name, model in self.models.items() if any(id(p) in trained for p in model.parameters())
        }
        names = {}
        for owner, model in owners.items():
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), name if len(owners) == 1 else f"{owner}.{name}")
        for owner, optimizer in self.optimizers.items():
            for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                names.setdefault(id(parameter), f"{owner}.{place}")
        return names

    def unsaved_parameters(self) -> list[str]:
        """Names of the parameters that an optimizer trains and that nothing here saves."""
        saved = {id(p) for model in self.models.values() for p in model.parameters()}
        memory = set()
        for part in self.others.values():
            memory |= {tensor.data_ptr() for tensor in split_tensors(part.state_dict())[1].values()}
        return [
            self.parameter_names[id(p)]
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) not in saved and p.data_ptr() not in memory
        ]

    def _derive(self) -> dict:
        """What must match on resume, from the objects themselves as they are at the start of the
        run."""
        facts = {"precision": self.accelerator.mixed_precision}
        for name, optimizer in self.optimizers.items():
            groups = [{k: v for k, v in group.items() if k not in IMPLEMENTATION} for group in optimizer.param_groups]
            facts[name] = {"class": type(optimizer).__name__, "groups": plain_facts(groups)}
        for name, part in self.others.items():
            facts[name] = {"class": type(part).__name__}
            if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
                facts[name] |= plain_facts(without_progress(part.state_dict()))
        return facts

    def save(
        self, step: int, metrics: dict[str, torch.Tensor], extra: dict, sync: Callable[[], None] | None = None
    ) -> None:
        """Copy the state after `step` steps into memory; a thread writes it to the disk.

        metrics: this process's tensors; extra: JSON, the main process's; sync: called in the thread
        before the checkpoint is whole, to flush what `extra` speaks of.

        The folder gets its name when all in it is on the disk, and older ones are removed after
        that: at no moment is there less than the last whole checkpoint. Before it copies, it waits
        for the one before. Raises: SystemExit on every rank if that one could not be written.
        """
        began = time.perf_counter()
        self.wait()
        if self._is_there(step):  # a run that was resumed here, and stopped before its first step
            return
        contents, scalars = self._collect()
        by_rank = gather_object([{**metrics, **random_states(self.accelerator)}])

        def start_writing():
            self._check_finite(contents, step)
            contents[PROCESSES] = {
                f"{rank}/{name}": tensor for rank, tensors in enumerate(by_rank) for name, tensor in tensors.items()
            }
            self.copies = {name: copy_to_cpu(tensors, self.copies.get(name, {})) for name, tensors in contents.items()}
            manifest = {
                "format": FORMAT,
                "step": step,
                "fixed": self.fixed,
                "derived": self.derived,
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
        """Until the last checkpoint is on the disk. Collective.

        Raises: SystemExit on every rank if it cannot be written.
        """

        def result():
            if self.writing is not None:
                writing, self.writing = self.writing, None
                writing.result()

        on_main(self.accelerator, result)

    def _is_there(self, step: int) -> bool:
        return on_main(self.accelerator, (self.folder / f"step_{step:08d}").exists)

    def _write(self, manifest: dict, sync: Callable[[], None] | None) -> None:
        """Write the copies as a checkpoint, in the thread. Raises: SystemExit if that fails."""
        began = time.perf_counter()
        step = manifest["step"]
        final = self.folder / f"step_{step:08d}"
        part = self.folder / f".part_{final.name}"
        try:
            # Not its parents: a run whose folder was moved or removed must not go on in half of a
            # new one.
            if not self.folder.is_dir():
                self.folder.mkdir()
                fsync_folder(self.folder.parent)
            remove(part)
            part.mkdir()
            manifest["sha256"] = {name: write_tensors(part / name, tensors) for name, tensors in self.copies.items()}
            if sync is not None:
                sync()
            manifest["checksum"] = checksum(manifest)
            write_synced(part / "manifest.json", json.dumps(manifest, indent=1).encode())
            fsync_folder(part)
            part.rename(final)
            fsync_folder(self.folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                remove(part)
            left = self.complete_steps()
            way_on = "there is none yet"
            if left:
                way_on = f"the one of step {left[0]} is whole, --resume goes on from it"
            if not self.folder.parent.is_dir():
                way_on = "the folder of the run was moved or removed"
            stop(f"the checkpoint of step {step} cannot be written to {self.folder} ({error.strerror}); {way_on}")
        for old in self.complete_steps()[self.keep :] if self.keep else []:
            self._remove_old(self.folder / f"step_{old:08d}")
        self._warn_if_slow(time.perf_counter() - began)

    def _warn_if_slow(self, write_time_s: float) -> None:
        """Say once that the launcher would kill the run before it has saved: a stop waits for the
        checkpoint under way, and then saves another one."""
        patience_s = launchers_patience_s()
        if 2 * write_time_s < patience_s or self.is_slow:
            return
        self.is_slow = True
        needed_s = 4 * math.ceil(write_time_s)
        show(
            f"warning: a checkpoint takes {write_time_s:.0f} s, and {patience_s:.0f} s after a "
            "Ctrl-C or SIGTERM the launcher kills its processes, saved or not: start it with "
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={needed_s} in the environment",
            "yellow",
        )

    def _check_finite(self, contents: dict[str, dict[str, torch.Tensor]], step: int) -> None:
        """Raises: SystemExit if a parameter is not finite: each resume would end with it. Buffers
        may well be infinite, as masks are."""
        for name, model in self.models.items():
            buffers = {key for key, _ in model.named_buffers()}
            parameters = {
                key: tensor
                for key, tensor in contents[f"{name}.safetensors"].items()
                if key not in buffers and tensor.dtype in FLOATS
            }
            if torch.nn.utils.get_total_norm(parameters.values()).isfinite():
                continue  # a tenth of the time of looking at each of them
            for key, tensor in parameters.items():
                if not tensor.isfinite().all():
                    stop(
                        f"{name}.{key} is not finite after step {step}, and no checkpoint of it "
                        "is saved: train with a smaller learning rate, or clip the gradients"
                    )

    def _remove_old(self, path: Path) -> None:
        """A checkpoint that cannot be removed costs disk space only, and the new one is saved."""
        try:
            # First its name, so that a kill in the middle leaves no half of a checkpoint.
            part = path.with_name(f".part_{path.name}")
            remove(part)
            path.rename(part)
            remove(part)
        except OSError as error:
            if path not in self.left:
                self.left.add(path)
                show(f"warning: {path} cannot be removed: {error.strerror or error}", "yellow")

    def _collect(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict]:
        """The tensors of each file, and by name what is no tensor; complete on the main process.
        Collective."""
        contents, scalars = {}, {}
        # Models first: after a test FSDP has some whole parameters, which no optimizer knows, and
        # asking for the state of a model makes them shards again.
        for name, model in self.models.items():
            contents[f"{name}.safetensors"] = self._joined(whole_model(self.accelerator, model))
        for name, optimizer in self.optimizers.items():
            tensors, scalars[name] = self._optimizer_state(optimizer)
            contents[f"{name}.safetensors"] = self._joined(tensors)
        for name, part in self.others.items():
            scalars[name], tensors = split_tensors(part.state_dict())
            if tensors:
                contents[f"{name}.safetensors"] = tensors
        return contents, scalars

    def _joined(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors if self.model_copy is None else join_parts(self.accelerator, self.model_copy, tensors)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict]:
        """State tensors as <parameter name>/<state name>; and what is no tensor: state, and each
        group's hyperparameters."""
        groups = [{k: plain_facts(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        tensors, numbers = {}, {}
        for parameter, state in self._whole_state(optimizer).items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{parameter}/{name}"] = value
                elif isinstance(value, (bool, int, float, str)):
                    numbers[f"{parameter}/{name}"] = value
                elif value is not None:
                    kind = type(optimizer).__name__
                    stop(f"the optimizer {kind} cannot be saved: its state {name} is a {type(value).__name__}")
        return tensors, {"groups": groups, "numbers": numbers}

    def _whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
        model = self._sharded_model_of(optimizer)
        if model is None:
            return {self.parameter_names[id(parameter)]: state for parameter, state in optimizer.state.items()}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        whole = get_optimizer_state_dict(model, optimizer, options=full_state_options())
        return whole.get("state", {})  # rank 0 alone has it

    def _sharded_model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self.models.values():
            if is_sharded(model) and any(id(parameter) in own for parameter in model.parameters()):
                return model
        return None

    def complete_steps(self) -> list[int]:
        """The steps of the checkpoints here, newest first, by number: as text 100000000 is below
        99999999."""
        names = [path.name for path in self.folder.glob("step_*")]
        steps = [int(name[5:]) for name in names if name[5:].isdecimal()]
        # Not step_25 or step_000000025, which `save` did not write.
        return sorted((step for step in steps if f"step_{step:08d}" in names), reverse=True)

    def load(self) -> tuple[int, dict, dict[str, torch.Tensor]]:
        """Load the newest whole checkpoint: (step, extra, this process's metrics); (0, {}, {})
        where there is none.

        Damaged ones are skipped with a warning that names the file, and renamed to damaged_step_*.
        Other numbers of processes read it as well; then the random states, which belong to a
        process, are left as they are, and the first process takes the metrics of all.
        Raises: SystemExit on every rank if none is whole though there are some, if it is of another
        version, or if it does not fit this run.
        """
        found = on_main(self.accelerator, self._read_newest)
        if found is None:
            return 0, {}, {}
        manifest, tensors = found
        problems = []
        for name, model in self.models.items():
            problems += self._load_model(name, model, tensors[f"{name}.safetensors"])
        if problems:
            self._refuse(problems)
        try:
            for name, optimizer in self.optimizers.items():
                self._load_optimizer(name, optimizer, tensors[f"{name}.safetensors"], manifest["state"][name])
            for name, part in self.others.items():
                saved = manifest["state"][name]
                state = join_tensors(saved, tensors.get(f"{name}.safetensors", {}))
                is_schedule = isinstance(part, torch.optim.lr_scheduler.LRScheduler)
                if is_schedule and state.keys() != part.state_dict().keys():
                    raise ValueError(f"it has {', '.join(state)}")
                part.load_state_dict(state)
            name = PROCESSES
            own_metrics = self._own_part(manifest, tensors[PROCESSES])
        except (*MALFORMED, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            stop(
                f"{name} in {self.folder}/step_{manifest['step']:08d} cannot be loaded "
                f"({type(error).__name__}: {reason}): remove that checkpoint to go on from the one "
                "before it"
            )
        return manifest["step"], manifest["extra"], own_metrics

    def load_weights(self, path: Path) -> None:
        """Models and optimizers from any checkpoint of such a run; hyperparameters, schedules and
        all else stay as they are."""
        manifest, tensors = read_checkpoint(path)
        for name, model in self.models.items():
            self._load_model(name, model, tensors[f"{name}.safetensors"])
        for name, optimizer in self.optimizers.items():
            own = [dict(group) for group in optimizer.param_groups]
            saved = tensors[f"{name}.safetensors"], manifest["state"][name]
            self._load_optimizer(name, optimizer, *saved)
            for group, values in zip(optimizer.param_groups, own, strict=True):
                group.update(values)

    def _load_model(self, name: str, model: nn.Module, saved: dict[str, torch.Tensor]) -> list[str]:
        """Load a model's state if it fits; returns what does not: names, shapes, types."""
        own = model.state_dict()
        if self.model_copy is not None:
            saved = {key: tensor for key, tensor in saved.items() if key in own}
        problems = []
        for key in own.keys() | saved.keys():
            was, now = (f"{s[key].dtype} {tuple(s[key].shape)}" if key in s else "absent" for s in (saved, own))
            if was != now:
                problems.append(f"{name}.{key} was {was.removeprefix('torch.')} and is {now.removeprefix('torch.')}")
        if problems:
            return sorted(problems)
        if not is_sharded(model):
            model.load_state_dict(saved, strict=True)
            return []
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(model, saved, options=full_state_options())
        return []

    def _load_optimizer(self, name: str, optimizer: torch.optim.Optimizer, tensors: dict, scalars: dict) -> None:
        state = {}
        for key, value in (*tensors.items(), *scalars["numbers"].items()):
            parameter, _, entry = key.rpartition("/")
            state.setdefault(parameter, {})[entry] = value
        model = self._sharded_model_of(optimizer)
        if model is not None and state:
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

            # Not with full_state_options(): rank 0 alone would get the names of the parameters.
            groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
            for group, saved in zip(groups, scalars["groups"], strict=True):
                restore_hyperparameters(group, saved)
            set_optimizer_state_dict(
                model, optimizer, {"state": state, "param_groups": groups}, options=full_state_options()
            )
            return
        own = optimizer.state_dict()
        numbered = {}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in zip((n for g in own["param_groups"] for n in g["params"]), parameters, strict=True):
            entries = state.get(self.parameter_names[id(parameter)])
            if entries is None:
                continue
            for entry, value in entries.items():
                # A fused step would run over the end of a tensor that is too small. Optimizers of
                # others may well have moments of their own shapes under these names.
                is_torch = type(optimizer).__module__.startswith("torch.optim")
                expected = parameter.shape if entry in MOMENTS else torch.Size()
                is_known = entry in MOMENTS or entry == "step"
                if is_torch and is_known and getattr(value, "shape", expected) != expected:
                    whose = f"{name}'s {self.parameter_names[id(parameter)]}/{entry}"
                    shapes = f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
                    self._refuse([f"{whose} has the shape {shapes}"])
            numbered[number] = entries
        for group, saved in zip(own["param_groups"], scalars["groups"], strict=True):
            restore_hyperparameters(group, saved)
        optimizer.load_state_dict({"state": numbered, "param_groups": own["param_groups"]})
        lay_out_like_parameters(optimizer)

    def _read_newest(self) -> tuple[dict, dict[str, dict[str, torch.Tensor]]] | None:
        for part in self.folder.glob(".part_*"):  # what a kill in the middle of a save left
            with contextlib.suppress(OSError):
                remove(part)
        steps, damaged = self.complete_steps(), []
        for step in steps:
            path = self.folder / f"step_{step:08d}"
            try:
                manifest, tensors = read_checkpoint(path, self._compare)
            except OSError as error:
                stop(
                    f"{error.filename or path} cannot be read ({error.strerror}): nothing was "
                    "changed, start again when it can"
                )
            except OtherFormat as other:
                stop(
                    f"{path} was written by another version of this code (format {other}, this one "
                    f"reads {FORMAT}): end that run with its own version, or start anew with "
                    "another --output_dir"
                )
            except ValueError as error:
                show(f"warning: {path} is skipped: {error}", "yellow")
                damaged.append(path)
                continue
            for other in damaged:  # its name will be needed again
                remove(other.with_name(f"damaged_{other.name}"))
                other.rename(other.with_name(f"damaged_{other.name}"))
            return manifest, tensors
        if steps:
            stop(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole: start anew with another --output_dir"
            )
        return None

    def _compare(self, manifest: dict) -> None:
        """Raises: SystemExit if what must match differs. What was said by the script goes before
        what follows from it."""
        parts = {*self.models, *self.optimizers, *self.others}
        files = manifest["sha256"].keys() - {PROCESSES}
        saved_parts = {name.removesuffix(".safetensors") for name in files}
        saved_parts |= manifest["state"].keys()
        if parts != saved_parts:
            saved_names, own_names = (", ".join(sorted(names)) for names in (saved_parts, parts))
            self._refuse([f"the checkpoint has {saved_names}, and the run {own_names}"])
        for saved, own in ((manifest["fixed"], self.fixed), (manifest["derived"], self.derived)):
            saved, own = flat(saved), flat(own)
            names = sorted(saved.keys() | own.keys())
            names.sort(key=is_no_class)  # other differences follow from another class
            differ = [
                f"{name.replace('.groups', '')} was {saved.get(name)!r} and is {own.get(name)!r}"
                for name in names
                if saved.get(name) != own.get(name)
            ]
            if differ:
                self._refuse(differ)

    def _refuse(self, reasons: list[str]) -> None:
        shown = "; ".join(reasons[:5]) + f"; and {len(reasons) - 5} more" * (len(reasons) > 5)
        stop(f"the run in {self.folder.parent} cannot be resumed with other arguments: {shown}")

    def _own_part(self, manifest: dict, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This process's metrics, from those of all processes; also sets its random states."""
        by_rank = [{} for _ in range(manifest["num_processes"])]
        random_by_rank = [{} for _ in by_rank]
        for key, tensor in tensors.items():
            rank, _, name = key.partition("/")
            place = random_by_rank if name.startswith("random_") else by_rank
            place[int(rank)][name] = tensor
        rank = self.accelerator.process_index
        if len(by_rank) == self.accelerator.num_processes:
            set_random_states(self.accelerator, random_by_rank[rank])
            return by_rank[rank]
        if rank == 0:  # another topology: one process takes over what all of them had counted
            names = sorted(set().union(*by_rank))
            return {name: torch.cat([r[name] for r in by_rank if name in r]) for name in names}
        # No samples, under the same names: `Metrics.reduce` needs the same ones on all processes.
        return {name: tensor[:0] for name, tensor in by_rank[0].items()}
