"""Describe the run that is about to start: topology, versions and commit, for the banner and run.json."""

import contextlib
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from . import VERSION
from .console import plural
from .launched import data_parallel_gpus, requested_topology

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "numpy")


def describe_topology(accelerator: Accelerator) -> dict:
    """The running topology, for run.json; "processes" has one entry per rank. Collective."""
    options, _ = requested_topology()
    gpus = data_parallel_gpus(accelerator)
    kind, layout = accelerator.distributed_type.value, accelerator.layout
    if 1 < layout.shards < layout.processes:
        kind = f"HSDP {layout.replicas} x {layout.shards}"
    on_gpu, backend = accelerator.device.type == "cuda", accelerator.state.backend
    if on_gpu and backend:  # with TORCH_DIST_USE_NCCL2=0, "nccl" is ProcessGroupNCCL, not ProcessGroupNCCL2
        backend += f" by {type(distributed.group.WORLD._get_backend(accelerator.device)).__name__}"
    this_process = {
        "rank": accelerator.process_index,
        "local_rank": accelerator.local_process_index,
        "host": socket.gethostname(),
        "device": "cpu" if accelerator.device.type == "cpu" else str(accelerator.device),
        "device_name": torch.cuda.get_device_name(accelerator.device) if on_gpu else None,
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
    }
    return {
        "config_file": os.path.relpath(options.config_file) if options and options.config_file else None,
        "distributed_type": "DATA_PARALLEL" if gpus > 1 else kind,
        "backend": backend,
        "num_processes": accelerator.num_processes,
        "data_parallel_gpus": gpus,
        "mixed_precision": accelerator.mixed_precision,
        "torch": torch.__version__,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "virtual_processes": layout.virtual_processes,
        "processes": gather_object([this_process]),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    match = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor()


def print_banner(accelerator: Accelerator, loader, total_steps: int, data: dict, output_dir, model_parts=None) -> dict:
    """Print the banner; returns `describe_topology`, with the notes of `model_parts`. Collective."""
    topology = describe_topology(accelerator)
    processes, accumulation = topology["num_processes"], topology["gradient_accumulation_steps"]
    virtual, gpus = topology["virtual_processes"], topology["data_parallel_gpus"]
    first = topology["processes"][0]
    machines = plural(len({process["host"] for process in topology["processes"]}), "machine")
    device = first["device_name"] or first["device"]
    if first["device"] == "cpu":
        device += f" with {plural(first['cpu_threads'], 'thread')}"
    kind = f" (DataParallel over {gpus} GPUs)" if gpus > 1 else ""
    if processes > 1:
        kind = f" ({topology['distributed_type']} over {topology['backend']})"
    steps_per_epoch, batch_size = len(loader), loader.sampler.batch_size
    size, rest = divmod(batch_size, accelerator.layout.num_slots)
    size = f"{size} or {size + 1}" if rest else size
    batch = model_parts.batch if model_parts else f"{size} per process x {plural(processes, 'process')}"
    batch += f" x {plural(accumulation, 'accumulation step')}"
    if virtual:
        batch = f"{size} per virtual process x {plural(virtual, 'virtual process')}"
    banner = (
        f"topology      {plural(processes, 'process')} on {machines}{kind}, each {device}, precision "
        f"{topology['mixed_precision']}\n"
        f"config        {topology['config_file']}\n"
        f"global batch  {batch_size} = {batch}\n"
        f"steps         {total_steps} steps = {total_steps / steps_per_epoch:.4g} epochs of {steps_per_epoch}\n"
        f"data          {', '.join(f'{name} {value}' for name, value in data.items())}\n"
        f"output        {output_dir}"
    )
    accelerator.print(banner)
    return topology | (model_parts.notes if model_parts else {})


def describe_code() -> dict:
    """The versions of Python, the installed packages and utils/, and the commit of the code."""
    versions = {"python": platform.python_version(), "utils": VERSION}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions, "git_commit": git_commit()}


def code_digests() -> dict[str, str]:
    """A digest of the script and of each file of utils/, which must be the same on all machines."""
    beside, script = Path(__file__).parents[1], Path(sys.argv[0])
    # Not by glob, which fails if a folder such as __pycache__ goes meanwhile.
    paths = (Path(folder, name) for folder, _, names in os.walk(beside / "utils") for name in names)
    files = {str(path.relative_to(beside)): path for path in paths if path.suffix == ".py"}
    files |= {script.name: script} if script.is_file() else {}  # not in a notebook
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:8] for name, path in sorted(files.items())}


def git_commit() -> str | None:
    """The commit of the code, followed by "+" if files have changed since; None outside git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    with contextlib.suppress(OSError):  # git is not installed
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    return None
