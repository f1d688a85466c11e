"""What the config file asks for, and whether that runs."""

import functools
import os
import shlex
import socket
import sys
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, gather_object

from .console import plural, stop

# Facts that may differ between machines: where their files are, and how many workers read them.
# resume_invariants is a list of names that follows from the script.
OWN = {"output_dir", "dataset", "num_workers", "resume_invariants"}


@functools.cache
def launcher_words() -> list[str] | None:
    """The words after `accelerate launch` on the command line; None without `accelerate launch`.

    The launcher does not pass its config on to the script, but it is an ancestor process of the script for as long as
    the script runs.
    """
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for position, word in enumerate(words[:4], 1):
            if Path(word).name in ("accelerate-launch", "accelerate.commands.launch"):
                return words[position:]
            if Path(word).name == "accelerate" and words[position : position + 1] == ["launch"]:
                return words[position + 1 :]
    return None


@functools.cache
def requested_topology():
    """The launcher's parsed options and its config, as a pair; each is None if there is none."""
    if launcher_words() is None:
        return None, None
    options = launch_command_parser().parse_args(launcher_words())
    if options.config_file is None and os.path.isfile(default_config_file) and not options.cpu:
        options.config_file = default_config_file  # Accelerate uses it without saying so
    return options, load_config_from_file(options.config_file) if options.config_file else None


def wants_cpu() -> bool:
    """Whether the config file or a launcher flag asks for the CPU. Then GPUs are left alone."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1"):  # cpu_ddp.yaml hides all GPUs
        return True
    options, config = requested_topology()
    return bool(options and options.cpu) or bool(config and config.use_cpu)


def check_topology(accelerator: Accelerator) -> None:
    """Compare the processes that run with what was asked for.

    Raises:
        SystemExit: if the processes do not form one group, if they would share a GPU, if their number, kind or device
            is not what the config file says, if version 1 of FSDP runs, or if fp16 is asked for on a CPU.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        stop(
            f"the launcher started {started} processes, but they do not find each other and would train {started} "
            "separate models: use accelerate_configs/cpu_ddp.yaml for several processes on the CPU"
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator.device.type == "cuda" and local_processes > torch.cuda.device_count():  # Accelerate shares them
        stop(
            f"{local_processes} processes were started on a machine where {torch.cuda.device_count()} GPUs are "
            "visible, so some would share a GPU: set num_processes in the config file to the number of GPUs"
        )
    options, config = requested_topology()
    if config is not None:
        check_config(accelerator, options, config)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        stop("version 1 of FSDP runs: set fsdp_version to 2 in the config file, as in accelerate_configs/fsdp.yaml")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":  # float32 would run
        stop("precision fp16 needs a GPU: set mixed_precision in the config file to bf16 or no")


def check_config(accelerator: Accelerator, options, config) -> None:
    """Compare the number of processes, the device and FSDP with the config file.

    Raises:
        SystemExit: if one of them differs.
    """
    name, kind, runs = os.path.relpath(options.config_file), config.distributed_type, accelerator.distributed_type
    asked = options.num_processes or config.num_processes
    if isinstance(asked, int) and asked != accelerator.num_processes:  # torchrun also takes "gpu"
        stop(
            f"{name} asks for {asked} processes with distributed_type {kind.value}, but the run has "
            f"{plural(accelerator.num_processes, 'process')}: use one of the files in accelerate_configs"
        )
    if accelerator.device.type == "cpu" and not wants_cpu():
        stop(f"{name} asks for a GPU and none is visible here: use cpu.yaml or cpu_ddp.yaml")
    if kind == DistributedType.FSDP and runs != DistributedType.FSDP:
        stop(f"{name} asks for FSDP, but {runs.value} runs: Accelerate shards on GPUs only")


def same_on_all(facts: dict) -> dict:
    """Return `facts` if they are equal on all processes. Collective.

    Names in OWN are not compared. With different arguments or data, two machines would train one model with two
    recipes, or wait for each other forever.

    Raises:
        SystemExit: on all processes; names the first rank that differs, its host, and in what.
    """
    compared = {name: value for name, value in facts.items() if name not in OWN}
    everyone = gather_object([(socket.gethostname(), compared)])
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        differences = [f"{name} {theirs.get(name)!r}, not {first.get(name)!r}" for name in names]
        if differences:
            stop(f"rank {rank} on {host} has {'; '.join(differences)} as rank 0 on {first_host}")
    return facts


def route_address() -> str | None:
    """The address that this machine uses to reach rank 0; None on a single machine, or without a route."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing: only finds the route
        except OSError:  # an IPv6 address, or no route
            return None
        address = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def bind_gloo_to_the_route() -> None:
    """Have gloo listen on the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME is set.

    By default gloo takes the address of the machine's own host name. On a stock Debian or Ubuntu that is 127.0.1.1,
    where no other machine can reach it.
    """
    address = route_address()
    for interface, addresses in psutil.net_if_addrs().items() if address else ():
        if address in [entry.address for entry in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def data_parallel_gpus(accelerator: Accelerator) -> int:
    """How many GPUs one process uses by nn.DataParallel (dp.yaml); 1 with any other config."""
    is_alone = accelerator.distributed_type == DistributedType.NO
    splits_batch = getattr(accelerator, "split_batch", True)  # an Accelerator of your own has none
    if accelerator.device.type != "cuda" or not is_alone or not splits_batch:
        return 1
    return torch.cuda.device_count()


def resume_command(output_dir: str | None) -> str:
    """The command that continues the run in `output_dir`: what the user typed, plus --resume."""
    words = [Path(sys.executable).name]
    if launcher_words() is not None:
        options, _ = requested_topology()
        script_position = launcher_words().index(options.training_script)
        words = ["accelerate", "launch", *launcher_words()[:script_position]]
    flags = [word for word in sys.argv[1:] if word != "--resume"]
    is_named = any(word.partition("=")[0] == "--output_dir" for word in flags)
    if output_dir is not None and not is_named:  # it was made for this run
        flags += ["--output_dir", str(output_dir)]
    return shlex.join([*words, sys.argv[0], *flags, "--resume"])
