"""Scripts that start their processes themselves: each rank does what one of these processes would do."""

import contextlib
import functools
import importlib
import itertools
import math
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from ..text import plural
from .where import pretend, wrap

MOST_FILES = 500  # that are searched
ON_A_MESH = 4  # processes, if a mesh of two dimensions is of any size
LIGHTNING = (
    ("lightning", "pytorch.trainer.trainer", "fabric.fabric"),
    ("pytorch_lightning", "trainer.trainer"),
    ("lightning_fabric", "fabric"),
)


class Starting:
    """The processes that the script asks for, which must be as many as there are ranks."""

    def __init__(self, recording):
        self.recording, self.processes = recording, recording.plan.processes
        self.started = 0  # by mp.Process

    def run(self, function, args) -> None:
        """Do the work of this rank. If it trains, the script ends there: what follows is not done by each process."""
        self.recording.facts.starts = self.recording.where.line()
        self.recording.where.begin = Starting.run.__code__
        function(*args)
        if self.recording.steps:
            self.recording.facts.is_complete = True
            self.recording.end()

    def check(self, number: int, source: str = "torch.cuda.device_count()") -> None:
        if number != self.processes:
            self.recording.facts.asked, line = number, self.recording.where.line()
            asks = f"it asks for {plural(number, 'process')}, and prove for {self.processes} ({line})"
            advice = f"take the number from {source}, or write {{processes}} for it among the flags of the script"
            self.recording.stop(asks if self.recording.plan.machines else f"{asks}: {advice}")


def install(recording) -> None:
    starting = Starting(recording)
    for devices in (torch.cuda, torch.accelerator):
        pretend(devices, "device_count", recording.plan.devices or int(os.environ["LOCAL_WORLD_SIZE"]))
    install_processes(starting)
    install_groups(starting)
    if recording.plan.makes_group and starting.processes == 1:
        dist.init_process_group()
    watch_lightning(recording)
    with contextlib.suppress(ImportError):
        install_notebooks(starting)


def install_processes(starting: Starting) -> None:
    recording = starting.recording
    spawning = sys.modules["torch.multiprocessing.spawn"]  # torch.multiprocessing.spawn is its function

    @wrap(spawning, "start_processes")
    def start(original, fn, args=(), nprocs=1, *others, **options):
        starting.check(nprocs)
        starting.run(fn, (recording.rank, *args))

    torch.multiprocessing.start_processes = spawning.start_processes

    @wrap(multiprocessing.process.BaseProcess, "start")
    def start_one(original, process):
        """One of a loop that starts all ranks, each with its number: each rank does the work of one."""
        code, args = getattr(process._target, "__code__", None), [*process._args, *process._kwargs.values()]
        number, is_own = starting.started, code and recording.where.is_own(code.co_filename)
        is_rank = is_own and not process.daemon and any(type(each) is int and each == number for each in args)
        if not is_rank or recording.steps or dist.is_initialized():
            return original(process)
        starting.started += 1
        if number == recording.rank:
            starting.run(functools.partial(process._target, **process._kwargs), process._args)
        return None

    @wrap(multiprocessing.process.BaseProcess, "join")
    def join(original, process, timeout=None):
        return original(process, timeout) if process._popen else None  # it may be another rank


def install_groups(starting: Starting) -> None:
    recording = starting.recording

    @wrap(dist, "init_process_group")
    def init(original, backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, *others, **options):
        """As torchrun does, whatever address the script has."""
        starting.check(starting.processes if world_size in (-1, None) else world_size, "WORLD_SIZE")
        if rank not in (-1, None, recording.rank):
            recording.stop(f"a process says that it is rank {rank}, and is {recording.rank} ({recording.where.line()})")
        os.environ.update(recording.plan.address)
        original("gloo", timeout=timeout, world_size=starting.processes, rank=recording.rank)
        recording.facts.group = recording.where.line()

    @wrap(dist, "new_group")
    def new_group(original, ranks=None, *others, **options):
        if ranks and max(ranks) >= starting.processes:
            has = f"prove has {starting.processes} ({recording.where.line()})"
            recording.stop(f"it makes a group of {len(ranks)} processes, and {has}")
        return original(ranks, *others, **options)

    @wrap(device_mesh, "init_device_mesh")
    def init_mesh(original, device_type, mesh_shape, *others, **options):
        """On one process, make a mesh of size 1, whatever size the script asks for."""
        if len(mesh_shape) > 1:
            size = math.prod(mesh_shape)  # 0 of (world_size // 2, 2) on one process
            recording.facts.mesh = size if size > 1 else ON_A_MESH
        if starting.processes == 1:
            mesh_shape = (1,) * len(mesh_shape)
        return original("cpu", mesh_shape, *others, **options)

    dist.init_device_mesh = device_mesh.init_device_mesh


def install_notebooks(starting: Starting) -> None:
    import accelerate

    @wrap(accelerate, "notebook_launcher")
    def launch(original, function, args=(), *others, **options):
        starting.run(function, args)

    accelerate.launchers.notebook_launcher = accelerate.launchers.debug_launcher = accelerate.notebook_launcher
    accelerate.debug_launcher = accelerate.notebook_launcher


def lightning_of(folder: Path) -> list[str]:
    """The packages of Lightning that the files in a folder import."""
    folders = (path for path in os.walk(folder) if "site-packages" not in path[0])
    files = (Path(path, name) for path, _, names in folders for name in names if name.endswith(".py"))
    text = " ".join(file.read_text(errors="replace") for file in itertools.islice(files, MOST_FILES))
    return [top for top, *_ in LIGHTNING if f"import {top}" in text or f"from {top}" in text]


def watch_lightning(recording) -> None:
    """Wrap Lightning's Trainer and Fabric if they are imported, or will be."""
    for top, *names in LIGHTNING:
        if top in sys.modules or top in recording.plan.lightning:
            for name in names:
                with contextlib.suppress(ImportError):
                    module = importlib.import_module(f"{top}.{name}")
                    watch_devices(module.Trainer if name.endswith("trainer") else module.Fabric, recording)


def watch_devices(cls: type, recording) -> None:
    @wrap(cls, "__init__")
    def init(original, self, *args, **options):
        own = {"accelerator": "cpu", "devices": recording.plan.processes, "num_nodes": 1}
        strategy = options.get("strategy", "auto")
        if strategy == "auto":
            own["strategy"] = "ddp"  # also on one process, so that its loaders have the same order
        elif not isinstance(strategy, str):  # Lightning refuses an accelerator in two places
            strategy._accelerator = strategy._parallel_devices = None
        if str(options.get("precision") or 32) not in ("32", "32-true"):
            recording.facts.switched_off.add("mixed precision")
            own["precision"] = "32-true"
        original(self, *args, **options | own)
        if hasattr(self, "_launched"):  # of Fabric, whose script may be written for `fabric run` and not launch it
            self.strategy.setup_environment()
            self._launched = True
