"""What the config file asks for, and whether the running processes match it."""

import contextlib
import functools
import os
import socket
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from .console import plural, show, stop

# Variables in which Kubeflow and SkyPilot state the size of the job, and the ones that torchrun sets
# (huggingface/accelerate#3414).
PROMISED_SIZES = {
    "PET_NNODES": "GROUP_WORLD_SIZE",
    "PET_NPROC_PER_NODE": "LOCAL_WORLD_SIZE",
    "SKYPILOT_NUM_NODES": "GROUP_WORLD_SIZE",
}


def launcher_words() -> list[str] | None:
    """The command-line arguments after `accelerate launch`; None without `accelerate launch`.

    The launcher does not pass its config on to the script, but it remains an ancestor process of the script.
    """
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        for position, argument in enumerate(command[:4], 1):
            if Path(argument).name in ("accelerate-launch", "accelerate.commands.launch"):
                return command[position:]
            if Path(argument).name == "accelerate" and command[position : position + 1] == ["launch"]:
                return command[position + 1 :]
    return None


def has_launcher() -> bool:
    """Whether `accelerate launch` or torchrun started this process; they set these variables."""
    return bool({"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"} & os.environ.keys())


@functools.cache
def requested_topology():
    """The launcher's parsed options and its config; each None if there is none."""
    words = launcher_words()
    if words is None:
        return None, None
    options = launch_command_parser().parse_args(words)
    if options.config_file is None and os.path.isfile(default_config_file) and not options.cpu:
        options.config_file = default_config_file  # Accelerate silently uses it
    return options, load_config_from_file(options.config_file) if options.config_file else None


def wants_cpu() -> bool:
    """Whether the config file or a launcher flag asks for the CPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1"):  # cpu_ddp.yaml hides all GPUs
        return True
    options, config = requested_topology()
    return bool(options and options.cpu) or bool(config and config.use_cpu)


def check_gpus() -> None:
    """Stop if processes would share a GPU (huggingface/accelerate#2246). Call it before the process group exists."""
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if 0 < gpus < processes and not wants_cpu():
        stop(
            f"{processes} processes were started on a machine with {plural(gpus, 'visible GPU')}, so some would share "
            "a GPU: set num_processes to the number of GPUs, in the config file or as a flag"
        )


def check_sharding() -> int | None:
    """Stop if FSDP, or the config file's parallelism_config, would train something else; returns its dp_shard_size."""
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if is_fsdp and os.environ.get("FSDP_VERSION") != "2":
        stop("FSDP needs `fsdp_version: 2` in the config file, as in accelerate_configs/fsdp.yaml")
    if is_fsdp and torch.__version__ < (2, 9, 99):  # over gloo, gradients would be summed: pytorch/pytorch#162338
        stop(f"FSDP needs torch 2.10 or newer, and this is {torch.__version__}: use ddp.yaml or cpu_ddp.yaml")
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") != "true":
        return None
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    replicas, shards, *others = (int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1)) for name in names)
    for name, size in zip(names[2:], others, strict=True):
        if size > 1:
            stop(f"parallelism_config: {name}_size {size} shares samples between processes: only dp sizes work here")
    if shards == 1 < replicas:  # nobody would broadcast the first weights
        stop(f"parallelism_config asks for {replicas} replicas of 1 shard: use ddp.yaml or multi_node.yaml")
    return shards


def check_topology(accelerator: Accelerator) -> None:
    """Stop unless the running processes are those that the launcher and the config file asked for."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        stop(
            f"the launcher started {started} processes, but they did not form a process group and would train "
            f"{started} separate models: use accelerate_configs/cpu_ddp.yaml for several processes on the CPU"
        )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if started == 1 and tasks != "1":  # huggingface/accelerate#1239; a sweep may mean it
        show(
            f"warning: srun started {tasks} tasks, and each trains a separate model; for one model, start one task "
            "per machine with accelerate launch in it, as accelerate_configs/slurm does"
        )
    for promised, name in PROMISED_SIZES.items():
        wanted, found = os.environ.get(promised, ""), os.environ.get(name, "1")
        if wanted.isdecimal() and wanted != found:
            stop(
                f"{promised} is {wanted}, but {name} is {found}, so each machine would train a separate model: start "
                f"with torchrun (`accelerate launch` overwrites these variables), or unset {promised}"
            )
    options, config = requested_topology()
    if config is not None:
        name, kind = os.path.relpath(options.config_file), config.distributed_type.value
        requested = options.num_processes or config.num_processes
        if isinstance(requested, int) and requested != accelerator.num_processes:  # torchrun also accepts "gpu"
            stop(
                f"{name} asks for {requested} processes with distributed_type {kind}, but the run has "
                f"{plural(accelerator.num_processes, 'process')}: use one of the files in accelerate_configs"
            )
        if accelerator.device.type == "cpu" and not wants_cpu():
            stop(f"{name} asks for a GPU, but none is visible: use cpu.yaml, cpu_ddp.yaml or cpu_fsdp.yaml")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":  # would silently use float32
        stop("precision fp16 needs a GPU: set mixed_precision in the config file to bf16 or no")


def bind_gloo_to_the_route() -> None:
    """Make gloo listen on the interface that leads to rank 0, on another machine, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the address of the host name: 127.0.1.1 on a stock Debian or Ubuntu, which no other machine
    can reach.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return
    # Sends nothing, only finds the route; an OSError: an IPv6 address, or no route
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((os.environ["MASTER_ADDR"], 1))
        address = probe.getsockname()[0]
        for interface, addresses in psutil.net_if_addrs().items():
            if address in [entry.address for entry in addresses] and not address.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def data_parallel_gpus(accelerator: Accelerator) -> int:
    """Number of GPUs that this process uses through nn.DataParallel (dp.yaml); 1 with any other config."""
    is_alone = accelerator.device.type == "cuda" and accelerator.distributed_type == DistributedType.NO
    return torch.cuda.device_count() if is_alone and accelerator.layout.split_batch else 1


def share_of_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """This process's share of the physical cores, or of what CPU affinity or a container's quota allows; at least 1."""
    cores = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):  # Linux
        cores.append(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):  # no container, or no quota: "max 100000"
        quota, period = map(int, quota_file.read_text().split())
        cores.append(quota // period)
    return max(1, min(cores) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
