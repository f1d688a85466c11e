"""What the config file asks for, what runs, and the banner that says so."""

import functools
import os
import platform
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

from .console import claims_others, plural, printable, stop
from .sampler import virtual_processes

# Facts that may differ between machines: where their files are, and how many workers read them.
# resume_invariants is a list of names that follows from the script.
OWN = {"output_dir", "dataset", "num_workers", "resume_invariants"}


@functools.cache
def launcher_words() -> list[str] | None:
    """The words after `accelerate launch` on the command line; None without `accelerate launch`.

    The launcher does not pass its config on to the script, but it is an ancestor process of the
    script for as long as the script runs.
    """
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for position, word in enumerate(words[:4]):
            rest = words[position + 1 :]
            if Path(word).name == "accelerate" and rest[:1] == ["launch"]:
                return rest[1:]
            if Path(word).name == "accelerate-launch" or word == "accelerate.commands.launch":
                return rest
    return None


@functools.cache
def requested_topology():
    """The launcher's parsed options and its config, as a pair; each is None if there is none."""
    if launcher_words() is None:
        return None, None
    options = launch_command_parser().parse_args(launcher_words())
    if options.config_file is None and os.path.isfile(default_config_file) and not options.cpu:
        options.config_file = default_config_file  # Accelerate uses it without saying so
    if not options.config_file:
        return options, None
    return options, load_config_from_file(options.config_file)


def wants_cpu() -> bool:
    """Whether the config file or a launcher flag asks for the CPU. Then GPUs are left alone."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1"):  # cpu_ddp.yaml hides all GPUs
        return True
    options, config = requested_topology()
    return bool(options and options.cpu) or bool(config and config.use_cpu)


def check_environment() -> None:
    """Check that the environment is that of a launcher, or of none.

    Raises:
        SystemExit: if variables of another launcher were left in it, by an `export` for instance.
    """
    left = [name for name in ("LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    if "MASTER_ADDR" not in os.environ and ("LOCAL_RANK" in left or claims_others()):
        shown = " and ".join(f"{name}={os.environ[name]}" for name in left)
        stop(
            f"{shown} in the environment, without MASTER_ADDR, is not from a launcher: unset "
            f"{' '.join(left)}, or start the script with accelerate launch"
        )


def check_topology(accelerator: Accelerator) -> None:
    """Compare the processes that run with what was asked for.

    Raises:
        SystemExit: if the processes do not form one group, if they would share a GPU, if their
            number, kind or device is not what the config file says, if version 1 of FSDP runs, or
            if fp16 is asked for on a CPU.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != accelerator.num_processes:
        stop(
            f"the launcher started {started} processes, but they do not find each other and would "
            f"train {started} separate models: use accelerate_configs/cpu_ddp.yaml for several "
            "processes on the CPU"
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator.device.type == "cuda" and local_processes > torch.cuda.device_count():
        # Accelerate takes the local rank modulo the number of GPUs.
        stop(
            f"{local_processes} processes were started on a machine where "
            f"{torch.cuda.device_count()} GPUs are visible, so some would share a GPU: set "
            "num_processes in the config file to the number of GPUs"
        )
    options, config = requested_topology()
    if config is not None:
        check_config(accelerator, options, config)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        stop(
            "checkpoints here hold what FSDP2 shards, and version 1 of FSDP runs: set fsdp_version "
            "to 2 in the config file, as in accelerate_configs/fsdp.yaml"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # Accelerate would train in float32 and not say so.
        stop(
            "precision fp16 needs a GPU: set mixed_precision in the config file to bf16 or no, "
            "or use a config file for GPUs"
        )


def check_config(accelerator: Accelerator, options, config) -> None:
    """Compare the number of processes, the device and FSDP with the config file.

    Raises:
        SystemExit: if one of them differs.
    """
    name = os.path.relpath(options.config_file)
    kind = config.distributed_type
    asked = options.num_processes or config.num_processes
    if isinstance(asked, int) and asked != accelerator.num_processes:  # torchrun also takes "gpu"
        stop(
            f"{name} asks for {asked} processes with distributed_type {kind.value}, but "
            f"the run has {plural(accelerator.num_processes, 'process')}: use one of the files in "
            "accelerate_configs"
        )
    if accelerator.device.type == "cpu" and not wants_cpu():
        stop(f"{name} asks for a GPU and none is visible here: use cpu.yaml or cpu_ddp.yaml")
    runs = accelerator.distributed_type
    if kind == DistributedType.FSDP and runs != DistributedType.FSDP:
        stop(f"{name} asks for FSDP, but {runs.value} runs: Accelerate shards on GPUs only")


def same_on_all(facts: dict) -> dict:
    """Return `facts` if they are equal on all processes. Collective: call it on every rank.

    Names in OWN are not compared. With different arguments or data, two machines would train one
    model with two recipes, or wait for each other forever.

    Raises:
        SystemExit: on all processes; names the first rank that differs, its host, and in what.
    """
    compared = {name: value for name, value in facts.items() if name not in OWN}
    everyone = gather_object([(socket.gethostname(), compared)])
    first_host, first = everyone[0]
    for rank, (host, theirs) in enumerate(everyone):
        differences = []
        for name in {**first, **theirs}:
            their_value = theirs.get(name)
            first_value = first.get(name)
            if their_value != first_value:
                differences.append(f"{name} {their_value!r}, not {first_value!r}")
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
    """The topology that runs, for run.json. Collective: call it on every rank.

    Returns:
        config file, distributed type, backend, precision and so on; "processes" has one entry a
        rank.
    """
    on_gpu = accelerator.device.type == "cuda"
    gpus = data_parallel_gpus(accelerator)
    distributed_type = accelerator.distributed_type.value
    if gpus > 1:
        distributed_type = "DATA_PARALLEL"
    options, _ = requested_topology()
    config_file = None
    if options and options.config_file:
        config_file = os.path.relpath(options.config_file)
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
        "config_file": config_file,
        "distributed_type": distributed_type,
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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
        steps_per_epoch: steps in one epoch.
        total_steps: steps of the whole run.
        data: names and values for the line "data"; an absolute path in "dataset" is shortened.
        batch_size: the global batch of one step, in samples.
        batch: how the global batch is made up, for a script whose processes share the model.
            None: per-process batch size x processes.
    """
    processes = topology["num_processes"]
    accumulation = topology["gradient_accumulation_steps"]
    hosts = len({process["host"] for process in topology["processes"]})
    first = topology["processes"][0]
    device = first["device_name"] or first["device"]
    if first["device"] == "cpu":
        device += f" with {plural(first['cpu_threads'], 'thread')}"
    kind = ""
    if topology["data_parallel_gpus"] > 1:
        kind = f" (DataParallel over {topology['data_parallel_gpus']} GPUs)"
    elif processes > 1:
        kind = f" ({topology['distributed_type']} over {topology['backend']})"
    shown = dict(data)
    if os.path.isabs(str(shown.get("dataset", ""))):
        shown["dataset"] = os.path.relpath(shown["dataset"])
    virtual = topology["virtual_processes"]
    parts = virtual or processes * accumulation
    if batch is None:
        smallest = batch_size // parts
        each = f"{smallest}" if batch_size % parts == 0 else f"{smallest} or {smallest + 1}"
        batch = f"{each} per process x {plural(processes, 'process')}"
    batch += f" x {plural(accumulation, 'accumulation step')}"
    if virtual:
        batch = f"{each} per virtual process x {plural(virtual, 'virtual process')}"
    banner = (
        f"topology      {plural(processes, 'process')} on {plural(hosts, 'machine')}{kind}, "
        f"each {device}, precision {topology['mixed_precision']}\n"
        f"config        {topology['config_file']}\n"
        f"global batch  {batch_size} = {batch}\n"
        f"steps         {total_steps} steps = {total_steps / steps_per_epoch:.4g} epochs of "
        f"{steps_per_epoch}\n"
        f"data          {', '.join(f'{name} {value}' for name, value in shown.items())}\n"
        f"output        {output_dir}"
    )
    accelerator.print(printable(banner), flush=True)


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
