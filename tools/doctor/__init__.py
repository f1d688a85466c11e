"""Inspect this machine: its hardware, the configs that fit, the commands to copy, and the problems.

    python tools/doctor

The exit code is 1 if a run would fail or give wrong results, else 0, even with warnings. Nothing is changed.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from utils.console import plural, show, stop

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/mnist_mlp.py"  # in the commands
MIN_SHM_GIB = 1
MIN_GPU_GIB = 2
MIN_DISK_GIB = 1
PACKAGES = ("torch", "torchvision", "accelerate", "datasets")  # in the report
TEST_PACKAGES = ("pytest", "pytest-xdist", "ruff")  # not needed for a run
# A regular expression for NAME=value, where it makes a run go wrong, and why. The first match counts.
VARIABLES = (
    ("WORLD_SIZE=(?!1$).*|LOCAL_RANK=.*", "everywhere", "makes a process wait for others"),
    ("ACCELERATE_TORCH_DEVICE=.*", "everywhere", "overrides the config file"),
    ("ACCELERATE_USE_.*", "on a GPU", "overrides the config file"),
    ("WORLD_SIZE=1|RANK=.*", "", "was left behind by a launcher"),
    ("ACCELERATE_.*", "", "is read by Accelerate in addition to the config file"),
    ("NCCL_.*", "", "changes the communication between GPUs in every run"),
    ("CUDA_VISIBLE_DEVICES=.*", "", "hides GPUs from torch, or renumbers them, and single_gpu.yaml replaces it by 0"),
)


class Gpu(NamedTuple):
    name: str
    memory_gib: float
    free_gib: float


def gather(folder: Path) -> SimpleNamespace:
    """Collect the facts about this machine. folder: where runs will be written."""
    import psutil

    memory = psutil.virtual_memory()
    with warnings.catch_warnings(record=True, action="always") as caught:
        broken = {name: error for name in ("torch", "torchvision", "accelerate") if (error := import_error(name))}
        seen_by_torch = {"device": "cpu", "gpus": [], "p2p": True} if "torch" in broken else ask_torch(memory)
    # torch's own: the driver is too old for its CUDA, or a GPU for its kernels.
    complaints = [one for one in caught if one.category is UserWarning and "torch/cuda" in one.filename]
    return SimpleNamespace(
        **seen_by_torch,
        complaints=[str(warning.message).strip() for warning in complaints],
        driver_gpus=output_of("nvidia-smi", "-L").count("GPU-"),  # including GPUs hidden from torch
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        load=psutil.getloadavg()[0],  # threads that ran or were ready to, over the last minute
        cpu_has_bf16=has_bf16(Path("/proc/cpuinfo")),  # None: unknown
        memory_gib=memory.total / 2**30,
        free_memory_gib=memory.available / 2**30,
        folder=str(folder),
        is_writable=is_writable(folder),
        free_disk_gib=shutil.disk_usage(folder).free / 2**30,
        shm_gib=shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else None,
        untested=untested_packages(ROOT / "requirements.txt"),
        broken=broken,  # name: why it cannot be imported
        environment=dict(os.environ),
        default_config=None if "accelerate" in broken else default_config(),  # used without --config_file
    )


def import_error(package: str) -> str | None:
    """Why a package cannot be imported; None if it can be."""
    try:
        importlib.import_module(package)
    except Exception as error:  # any type: OSError, RuntimeError, AttributeError, ...
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def untested_packages(path: Path) -> dict[str, tuple[str | None, str]]:
    """{name: (version, tested versions)} of the unmet requirements; version is None if the package is missing."""
    from packaging.requirements import Requirement

    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    untested = {}
    for requirement in map(Requirement, filter(None, lines)):
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            untested[requirement.name] = version, str(requirement.specifier)
    return untested


def installed_version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def ask_torch(memory) -> dict:
    """torch's device ("cuda", "mps", "cpu", ...), the GPUs that it sees, and whether each can read the others' memory.

    memory: from psutil; Apple's GPU uses the machine's memory.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device, gpus = accelerator.type if accelerator else "cpu", []
    for index in range(torch.accelerator.device_count() if accelerator else 0):
        if device == "mps":
            gpus.append(Gpu("Apple GPU", memory.total / 2**30, memory.available / 2**30))
            continue
        module = torch.get_device_module(device)
        facts, free = module.get_device_properties(index), 0
        with contextlib.suppress(RuntimeError):  # mem_get_info itself needs some memory
            free, _ = module.mem_get_info(index)
        gpus.append(Gpu(facts.name, facts.total_memory / 2**30, free / 2**30))
    pairs = itertools.permutations(range(len(gpus) if device == "cuda" else 0), 2)
    return {"device": device, "gpus": gpus, "p2p": all(itertools.starmap(torch.cuda.can_device_access_peer, pairs))}


def has_bf16(cpu_info: Path) -> bool | None:
    """Whether a CPU has bf16 instructions (AVX512-BF16, AMX, or ARM's), from Linux's cpuinfo. None: unknown."""
    with contextlib.suppress(OSError):
        return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpu_info.read_text()) is not None
    return None


def output_of(*command: str) -> str:
    """What a program prints; "" if it is missing, fails, or hangs, as nvidia-smi does with a broken GPU."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def is_writable(folder: Path) -> bool:
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder):
        return True
    return False


def default_config() -> str | None:
    from accelerate.commands.config import default_config_file as path

    return path if os.path.isfile(path) else None


def choices(facts: SimpleNamespace) -> list[tuple[str, str, str]]:
    """The configs that work on this machine as (name, why, command), the recommended one first."""
    count, cuda = len(facts.gpus), facts.device == "cuda"
    several = cuda and count > 1
    one_gpu = "the first GPU only, the others stay free" if count > 1 else "there is one GPU"
    # Unlike the default, these are divisible by any number of GPUs.
    batch, many_batch = f" --batch_size {128 * count}", f" --batch_size {256 * count}"
    many = f"--num_processes {2 * count} --main_process_ip ADDRESS_OF_MACHINE_0 --machine_rank 0 "
    table = [  # works, name, why, flags of the launcher, flags of the script
        (several, "ddp", f"one process on each of {count} GPUs: the fastest", "", batch),
        (several, "dp", f"one process for all {count} GPUs: slower, for comparison", "", batch),
        (several, "fsdp", f"a model too large for one GPU, sharded over {count}", "", batch),
        (count > 0, "single_gpu", one_gpu, "", ""),
        (cuda, "multi_node", "two machines like this one, each with its own --machine_rank", many, many_batch),
        (True, "cpu", "a first run without a GPU" if count else "torch sees no GPU", "", ""),
        (True, "cpu_ddp", "DistributedDataParallel without a GPU, to learn or test", "", ""),
        (True, "cpu_fsdp", "sharding without a GPU, to learn or test", "", ""),
    ]
    launch = "accelerate launch --config_file accelerate_configs"
    return [
        (name, why, f"{launch}/{name}.yaml {launcher_flags}{SCRIPT}{flags}")
        for works, name, why, launcher_flags, flags in table
        if works
    ]


def problems(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    """The problems as (whether a run would fail or go wrong, message)."""
    yield from package_problems(facts)
    yield from hardware_problems(facts)
    for setting in sorted(f"{name}={value}" for name, value in facts.environment.items()):
        for pattern, where, effect in VARIABLES:
            if re.fullmatch(pattern, setting):
                fails = where == "everywhere" or (where == "on a GPU" and len(facts.gpus) > 0)
                yield fails, f"{setting} in the environment {effect}: unset it, unless it is intended"
                break
    if facts.default_config:
        yield False, f"{facts.default_config} is silently used without --config_file: always pass one, or delete it"


def package_problems(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    install = "pip install -r requirements.txt"
    for name, (version, tested) in facts.untested.items():
        state = f"{version} is not the tested {tested}" if version else "is not installed"
        yield not version and name not in TEST_PACKAGES, f"{name} {state}: {install}"
    for name, error in facts.broken.items():
        # If torch is broken, torchvision and accelerate fail with the same error.
        if installed_version(name) and (name == "torch" or "torch" not in facts.broken):
            yield True, f"{name} cannot be imported ({error}): {install} --force-reinstall"


def hardware_problems(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    count = len(facts.gpus)
    if facts.driver_gpus and not count and "torch" not in facts.broken:
        advice = "update the driver, or install a torch built with CUDA for this driver"
        if "CUDA_VISIBLE_DEVICES" in facts.environment:
            advice = "unset CUDA_VISIBLE_DEVICES"
        yield True, f"nvidia-smi lists {plural(facts.driver_gpus, 'GPU')}, torch sees none: {advice}"
    yield from ((True, complaint) for complaint in facts.complaints)
    for index, gpu in enumerate(facts.gpus):
        if facts.device != "mps" and gpu.free_gib < gpu.memory_gib / 2:
            free = f"GPU {index} has only {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
            advice = "end the process that nvidia-smi shows, or pass --gpu_ids without this GPU"
            yield gpu.free_gib < MIN_GPU_GIB, f"{free}: {advice}"
    processes = count if facts.device == "cuda" else 2  # ddp.yaml's or cpu_ddp.yaml's
    if facts.cores < processes:
        yield False, f"{processes} processes would share {plural(facts.cores, 'core')}: pass a smaller --num_processes"
    if facts.load > facts.cores and "OMP_WAIT_POLICY" not in facts.environment:
        yield False, f"the load of the CPU is {facts.load:.0f}: set OMP_WAIT_POLICY=PASSIVE, or waiting threads spin"
    if facts.shm_gib is not None and facts.shm_gib < MIN_SHM_GIB:
        shm = f"/dev/shm has {facts.shm_gib * 1024:.0f} MiB free"
        effect = "when it is full, data workers end with a bus error and NCCL does not start"
        yield count > 1, f"{shm}, and {effect}: start the container with --shm-size=8g, or pass --num_workers 0"
    if not facts.is_writable:
        yield True, f"{facts.folder} is not writable: pass a writable --output_dir"
    elif facts.free_disk_gib < MIN_DISK_GIB:
        yield False, f"{facts.folder} has {facts.free_disk_gib:.2f} GiB free: pass an --output_dir on a different disk"


def hardware(facts: SimpleNamespace) -> Iterator[tuple[str, str]]:
    """The rows about the machine as (name, text)."""
    if not facts.gpus:
        yield "GPU", "none visible to torch"
    for index, gpu in enumerate(facts.gpus):
        yield f"GPU {index}", f"{gpu.name}, {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
    if not facts.p2p:
        yield "P2P", "not between all GPUs: NCCL sends through the memory of the CPU"
    bf16 = {True: ", bf16: twice as fast for convolutions", False: ", bf16: slower than float32"}
    yield "CPU", plural(facts.cores, "core") + bf16.get(facts.cpu_has_bf16, "")
    yield "memory", f"{facts.free_memory_gib:.1f} of {facts.memory_gib:.1f} GiB free"
    yield "disk", f"{facts.free_disk_gib:.0f} GiB free in {facts.folder}"
    versions = [f"{name} {installed_version(name) or 'missing'}" for name in PACKAGES]
    yield "versions", ", ".join([f"python {platform.python_version()}", *versions])


def main() -> int:
    parser = argparse.ArgumentParser("doctor", description="Inspect this machine and recommend a config.")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs"), help="where runs will be written (%(default)s)"
    )
    folder = parser.parse_args().output_dir.absolute()
    while not folder.exists():  # a run creates missing folders
        folder = folder.parent
    try:
        facts = gather(folder)
    except ImportError as error:
        stop(f"{error.name} is not installed: pip install -r requirements.txt")
    sorted_problems = sorted(problems(facts), reverse=True)
    report(facts, sorted_problems)
    return int(any(fails for fails, _ in sorted_problems))


def report(facts: SimpleNamespace, sorted_problems: list[tuple[bool, str]]) -> None:
    """Print the machine, the configs that work, and the problems."""
    for name, text in hardware(facts):
        show(f"{name:<10}{text}")
    (name, why, command), *others = choices(facts)
    show(f"\nUse {name}.yaml: {why}\n    {command}\n\nOr")
    for name, why, command in others:
        show(f"{name + '.yaml':<16}{why}\n    {command}")
    show("")
    for fails, sentence in sorted_problems:
        show(f"{'error' if fails else 'warning'}: {sentence}", "red" if fails else "yellow")
    if not sorted_problems:
        show("No problems found", "green")
