"""Which configs fit this machine, with the commands to copy, and what would make a run fail.

    python tools/doctor
    python tools/doctor --gpus    # also measures the GPUs and the links between them, in a minute

The exit code is 0, even with warnings, unless a run would fail or give wrong results. Nothing is changed. For the
hardware and all versions, see `accelerate env` and `python -m torch.utils.collect_env`.
"""

import argparse
import importlib
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from utils.console import plural, show, stop

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/mnist_mlp.py"  # in the commands
INSTALL = "pip install -r requirements.txt"
MIN_SHM_GIB = 1
TESTED = ("2.10", "2.14")  # the oldest and the newest torch of .ci/run
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


def gather() -> SimpleNamespace:
    """Collect the facts about this machine."""
    import torch
    from accelerate.commands.config import default_config_file

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator and accelerator.type == "cuda":
            torch.cuda.init()
    # torch's own: the driver is too old for its CUDA, or a GPU for its kernels.
    complaints = [one for one in caught if one.category is UserWarning and "torch/cuda" in one.filename]
    return SimpleNamespace(
        device=accelerator.type if accelerator else "cpu",  # "cuda", "mps", "cpu", ...
        num_gpus=torch.accelerator.device_count() if accelerator else 0,
        complaints=[str(warning.message).strip() for warning in complaints],
        driver_gpus=count_driver_gpus(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        shm_gib=shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else None,
        untested=untested_packages(ROOT / "requirements.txt"),
        environment=dict(os.environ),
        default_config=default_config_file if os.path.isfile(default_config_file) else None,
    )


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
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def count_driver_gpus() -> int:
    """The GPUs that nvidia-smi lists, including those hidden from torch; 0 if it is missing, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 0
    return done.stdout.count("GPU-")


def choices(facts: SimpleNamespace) -> list[tuple[str, str, str]]:
    """The configs that work on this machine as (name, why, command), the recommended one first."""
    count, cuda = facts.num_gpus, facts.device == "cuda"
    several = cuda and count > 1
    one_gpu = "the first GPU only, the others stay free" if count > 1 else "there is one GPU"
    # Unlike the default, these are divisible by any number of GPUs.
    batch, many_batch = f" --batch_size {128 * count}", f" --batch_size {256 * count}"
    many = f"--num_processes {2 * count} --main_process_ip ADDRESS_OF_MACHINE_0 --machine_rank 0 "
    sizes = f"--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size {count} "
    table = [  # works, name, why, flags of the launcher, flags of the script
        (several, "ddp", f"one process on each of {count} GPUs: the fastest", "", batch),
        (several, "dp", f"one process for all {count} GPUs: slower, for comparison", "", batch),
        (several, "fsdp", f"a model too large for one GPU, sharded over {count}", "", batch),
        (count > 0, "single_gpu", one_gpu, "", ""),
        (cuda, "multi_node", "two machines like this one, each with its own --machine_rank", many, many_batch),
        (several, "hsdp", "the same, for a model too large for one GPU", many + sizes, many_batch),
        (True, "cpu", "a first run without a GPU" if count else "torch sees no GPU", "", ""),
        (True, "cpu_ddp", "DistributedDataParallel without a GPU, to learn or test", "", ""),
        (True, "cpu_fsdp", "sharding without a GPU, to learn or test", "", ""),
        (True, "cpu_hsdp", "two replicas of two shards without a GPU, to learn or test", "", ""),
    ]
    launch = "accelerate launch --config_file accelerate_configs"
    return [
        (name, why, f"{launch}/{name}.yaml {launcher_flags}{SCRIPT}{flags}")
        for works, name, why, launcher_flags, flags in table
        if works
    ]


def problems(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    """The problems as (whether a run would fail or go wrong, message)."""
    for name, (version, tested) in facts.untested.items():
        state = f"{version} is not the tested {tested}" if version else "is not installed"
        yield not version, f"{name} {state}: {INSTALL}"
    if facts.driver_gpus and not facts.num_gpus:
        advice = "update the driver, or install a torch built with CUDA for this driver"
        if "CUDA_VISIBLE_DEVICES" in facts.environment:
            advice = "unset CUDA_VISIBLE_DEVICES"
        yield True, f"nvidia-smi lists {plural(facts.driver_gpus, 'GPU')}, torch sees none: {advice}"
    yield from ((True, complaint) for complaint in facts.complaints)
    processes = facts.num_gpus if facts.device == "cuda" else 2  # of ddp.yaml or cpu_ddp.yaml
    if facts.cores < processes:
        yield False, f"{processes} processes would share {plural(facts.cores, 'core')}: pass a smaller --num_processes"
    if facts.shm_gib is not None and facts.shm_gib < MIN_SHM_GIB:
        shm = f"/dev/shm has {facts.shm_gib * 1024:.0f} MiB free"
        effect = "when it is full, data workers end with a bus error and NCCL does not start"
        advice = "start the container with --shm-size=8g, or pass --num_workers 0"
        yield facts.num_gpus > 1, f"{shm}, and {effect}: {advice}"
    for setting in sorted(f"{name}={value}" for name, value in facts.environment.items()):
        for pattern, where, effect in VARIABLES:
            if re.fullmatch(pattern, setting):
                fails = where == "everywhere" or (where == "on a GPU" and facts.num_gpus > 0)
                yield fails, f"{setting} in the environment {effect}: unset it, unless it is intended"
                break
    if facts.default_config:
        yield False, f"{facts.default_config} is silently used without --config_file: always pass one, or delete it"


def measure_gpus(stand_ins: int) -> list[tuple[bool, str]]:
    """Print what gpus.py measures; returns its problems, as `problems` does."""
    from tools.doctor import gpus

    found = []
    for kind, sentence in gpus.check(stand_ins):
        if kind:
            found.append((kind == "error", sentence))
        else:
            show(sentence)
    return found


def main() -> int:
    parser = argparse.ArgumentParser("doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", action="store_true", help="measure GPUs: products, copies, an all-reduce")
    parser.add_argument("--stand_ins", type=int, default=0, metavar="N", help="with --gpus: try it out on N x the CPU")
    args = parser.parse_args()
    for package in ("torch", "torchvision", "accelerate"):
        try:
            importlib.import_module(package)
        except Exception as error:  # any type: ImportError, OSError, RuntimeError, AttributeError, ...
            stop(f"{package} cannot be imported ({type(error).__name__}: {error}): {INSTALL} --force-reinstall")
    facts = gather()
    (name, why, command), *others = choices(facts)
    show(f"Use {name}.yaml: {why}\n    {command}\n\nOr")
    for name, why, command in others:
        show(f"{name + '.yaml':<16}{why}\n    {command}")
    version = metadata.version("torch")
    show(f"\ntorch {version}: tested with {' and '.join(TESTED)}\n")
    found = sorted(problems(facts), reverse=True)
    if args.gpus:
        found += measure_gpus(args.stand_ins)
    for fails, sentence in found:
        show(f"{'error' if fails else 'warning'}: {sentence}")
    if not found:
        show("No problems found")
    return int(any(fails for fails, _ in found))
