"""What the config file asks for, what runs, and the banner that says so."""

import functools
import os
import platform
import re
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

from .console import plural, show, stop
from .sampler import virtual_processes

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
    local_processes, on_cpu = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), accelerator.device.type == "cpu"
    # Accelerate takes the local rank modulo the number of GPUs.
    if accelerator.device.type == "cuda" and local_processes > torch.cuda.device_count():
        stop(
            f"{local_processes} processes were started on a machine where {torch.cuda.device_count()} GPUs are "
            "visible, so some would share a GPU: set num_processes in the config file to the number of GPUs"
        )
    options, config = requested_topology()
    if config is not None:
        check_config(accelerator, options, config)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        stop(
            "checkpoints hold what FSDP2 shards, and version 1 of FSDP runs: set fsdp_version to 2 in the config "
            "file, as in accelerate_configs/fsdp.yaml"
        )
    if accelerator.mixed_precision == "fp16" and on_cpu:  # Accelerate would train in float32 and not say so
        stop(
            "precision fp16 needs a GPU: set mixed_precision in the config file to bf16 or no, or use a config file "
            "for GPUs"
        )


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


def data_parallel_gpus(accelerator: Accelerator) -> int:
    """How many GPUs one process uses by nn.DataParallel (dp.yaml); 1 with any other config."""
    is_alone = accelerator.distributed_type == DistributedType.NO
    splits_batch = getattr(accelerator, "split_batch", True)  # an Accelerator of your own has none
    if accelerator.device.type != "cuda" or not is_alone or not splits_batch:
        return 1
    return torch.cuda.device_count()


def describe_topology(accelerator: Accelerator) -> dict:
    """The topology that runs, for run.json; "processes" has one entry per rank. Collective."""
    options, _ = requested_topology()
    gpus = data_parallel_gpus(accelerator)
    on_gpu = accelerator.device.type == "cuda"
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
        "distributed_type": "DATA_PARALLEL" if gpus > 1 else accelerator.distributed_type.value,
        "backend": accelerator.state.backend,
        "num_processes": accelerator.num_processes,
        "data_parallel_gpus": gpus,
        "mixed_precision": accelerator.mixed_precision,
        "torch": torch.__version__,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "virtual_processes": virtual_processes(accelerator),
        "processes": gather_object([this_process]),
    }


def cpu_name() -> str:
    """The model of the CPU, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")  # of Linux
    found = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor()


def announce(
    accelerator: Accelerator,
    topology: dict,
    output_dir: str | os.PathLike,
    steps_per_epoch: int,
    total_steps: int,
    data: dict,
    batch_size: int,
    batch: str | None = None,
) -> None:
    """Print the banner: what is going to run.

    Args:
        topology: what `describe_topology` returned.
        data: names and values for the line "data".
        batch_size: samples per optimizer step, over all processes.
        batch: how these are made up, for a script whose processes share the model. None: a part for each process.
    """
    processes, accumulation = topology["num_processes"], topology["gradient_accumulation_steps"]
    virtual, gpus = topology["virtual_processes"], topology["data_parallel_gpus"]
    first = topology["processes"][0]
    machines = plural(len({process["host"] for process in topology["processes"]}), "machine")
    device = first["device_name"] or first["device"]
    if first["device"] == "cpu":
        device += f" with {plural(first['cpu_threads'], 'thread')}"
    kind = ""
    if gpus > 1:
        kind = f" (DataParallel over {gpus} GPUs)"
    elif processes > 1:
        kind = f" ({topology['distributed_type']} over {topology['backend']})"
    each, rest = divmod(batch_size, virtual or processes * accumulation)
    each = f"{each} or {each + 1}" if rest else each
    batch = batch or f"{each} per process x {plural(processes, 'process')}"
    batch += f" x {plural(accumulation, 'accumulation step')}"
    if virtual:
        batch = f"{each} per virtual process x {plural(virtual, 'virtual process')}"
    if accelerator.is_main_process:
        show(
            f"topology      {plural(processes, 'process')} on {machines}{kind}, each {device}, precision "
            f"{topology['mixed_precision']}\n"
            f"config        {topology['config_file']}\n"
            f"global batch  {batch_size} = {batch}\n"
            f"steps         {total_steps} steps = {total_steps / steps_per_epoch:.4g} epochs of {steps_per_epoch}\n"
            f"data          {', '.join(f'{name} {value}' for name, value in data.items())}\n"
            f"output        {output_dir}"
        )


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
