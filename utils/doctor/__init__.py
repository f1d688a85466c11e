"""Inspect this machine: its hardware, the configs that fit, the commands to copy, and the problems.

    python -m utils.doctor

The exit code is 1 if a run would fail or give wrong results, else 0, also with warnings. It changes nothing, needs no
other module but console.py, and works without requirements.txt, configs and scripts too.

Not asked of others: `pip check` compares installed packages with each other, not with requirements.txt, and finds no
library that cannot be loaded; torch.utils.collect_env knows no free memory, links, disks, ports or settings.
"""

import argparse
import ast
import contextlib
import importlib
import ipaddress
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from ..console import plural, stop

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "mnist_mlp.py"  # the script in the commands, where it exists
DEFAULT_PORT = 29500  # Accelerate's, if neither a flag nor the config names one
MIN_SHM_GIB = 1
MIN_GPU_GIB = 2
MIN_DISK_GIB = 1
MIN_DISK_MIB_PER_S = 20
NEEDED = ("torch", "accelerate")  # by every script, whatever requirements.txt says
PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate")
TEST_PACKAGES = ("pytest", "pytest-xdist", "ruff")  # no run needs them
# NAME=value as a regular expression, where a run goes wrong, why. The first match counts.
VARIABLES = (
    ("WORLD_SIZE=(?!1$).*|LOCAL_RANK=.*", "everywhere", "makes a process wait for others"),
    ("ACCELERATE_TORCH_DEVICE=.*", "everywhere", "overrides the config file"),
    ("ACCELERATE_USE_.*", "on a GPU", "overrides the config file"),
    ("WORLD_SIZE=1|RANK=.*", "", "was left by another launcher"),
    ("ACCELERATE_.*", "", "is read by Accelerate in addition to the config file"),
    ("NCCL_.*", "", "changes the communication between GPUs in every run"),
    ("CUDA_VISIBLE_DEVICES=.*", "", "hides GPUs from torch, or renumbers them"),
    ("OMP_NUM_THREADS=.*", "", "limits NumPy, but not torch: the scripts set torch's threads"),
)


class Gpu(NamedTuple):
    name: str
    memory_gib: float
    free_gib: float


def gather(folder: Path) -> SimpleNamespace:
    """All facts that the other functions use. folder: where runs will be written."""
    import psutil

    memory, host = psutil.virtual_memory(), socket.gethostname()
    requirements = read_requirements(ROOT / "requirements.txt")
    configs = {path.stem: read_yaml(path) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
    ports = {number(config, "main_process_port", DEFAULT_PORT) for config in configs.values()}
    paths = sorted([*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py")])
    scripts = {str(path.relative_to(ROOT)): path.read_text(errors="replace") for path in paths}
    errors = {name: import_error(name) for name in ("torch", "torchvision", "accelerate")}
    broken = {name: error for name, error in errors.items() if error}
    names = [*PACKAGES, *(requirement.name for requirement in requirements)]
    has_affinity = hasattr(os, "sched_getaffinity")
    return SimpleNamespace(
        **({"device": "cpu", "gpus": [], "backends": {}} if "torch" in broken else ask_torch(memory)),
        driver_gpus=output_of("nvidia-smi", "-L").count("GPU-"),  # also those hidden from torch
        links=count_links(output_of("nvidia-smi", "topo", "-m")),  # kind: pairs of GPUs
        cores=len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        cpu_has_bf16=has_bf16(Path("/proc/cpuinfo")),  # None: unknown
        memory_gib=memory.total / 2**30,
        free_memory_gib=memory.available / 2**30,
        folder=str(folder),
        free_disk_gib=shutil.disk_usage(folder).free / 2**30,
        disk_mib_per_s=write_speed(folder),  # None: nothing can be written there
        shm_gib=shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else None,
        requirements=requirements,
        versions={name: installed_version(name) for name in names},  # None: not installed
        broken=broken,  # package: why it cannot be imported
        environment=dict(os.environ),
        default_config=None if "accelerate" in broken else default_config(),  # path and content
        configs=configs,  # None: cannot be read
        used_ports=[port for port in sorted(ports) if port_in_use(port)],
        host=host,
        addresses=reachable_addresses(host),  # by which other machines could find this one
        example=example_script(scripts),  # the script in the commands, and whether it has our flags
        own_accelerators=[name for name, text in scripts.items() if ignores_cpu_config(text)],
    )


def read_requirements(path: Path) -> list:
    """The requirements in a file, without options, paths and URLs; none if it does not exist."""
    from packaging.requirements import InvalidRequirement, Requirement

    requirements = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(InvalidRequirement):
            requirements.append(Requirement(line.partition("#")[0].strip()))
    return [requirement for requirement in requirements if requirement.url is None]


def example_script(scripts: dict[str, str]) -> tuple[str, bool]:
    """The script to show in the commands, and whether it takes our --batch_size and --output_dir.

    scripts: their text by their path. EXAMPLE if it exists, else the first that uses Accelerate.
    """
    for name in (f"scripts/{EXAMPLE}", EXAMPLE):
        if name in scripts:
            return name, True
    for name, text in scripts.items():
        if "accelerat" in text:
            return name, "--batch_size" in text
    return "your_script.py", False


def ignores_cpu_config(text: str) -> bool:
    """Whether a script makes an Accelerator of its own without saying that the CPU is meant."""
    try:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return False
    if "make_accelerator" in text or "ACCELERATE_USE_CPU" in text:
        return False
    calls = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "Accelerator"]
    # None: **flags, which may say cpu.
    return any({"cpu", None}.isdisjoint(keyword.arg for keyword in call.keywords) for call in calls)


def read_yaml(path) -> dict | None:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def number(config: dict | None, key: str, default: int) -> int:
    value = (config or {}).get(key)
    return value if isinstance(value, int) else default


def default_config() -> tuple[str, dict | None] | None:
    from accelerate.commands.config import default_config_file as path

    return (path, read_yaml(path)) if os.path.isfile(path) else None


def output_of(*command: str) -> str:
    """What a program prints; "" if it does not exist, fails, or hangs, as nvidia-smi with a broken GPU."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def import_error(package: str) -> str | None:
    """Why a package cannot be imported; None if it can be."""
    try:
        importlib.import_module(package)
    except Exception as error:  # any type: OSError, RuntimeError, AttributeError, ...
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def installed_version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def ask_torch(memory) -> dict:
    """torch's device ("cuda", "mps", "cpu", ...), the GPUs that it sees, and its backends.

    memory: psutil's; Apple's GPU uses the memory of the machine.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    device, gpus = found.type if found else "cpu", []
    for index in range(torch.accelerator.device_count() if found else 0):
        if device == "mps":
            name, free, total = "Apple GPU", memory.available, memory.total
        else:
            module = torch.get_device_module(device)
            name, total = module.get_device_name(index), module.get_device_properties(index).total_memory
            free = 0
            with contextlib.suppress(RuntimeError):  # the question itself needs some memory
                free, _ = module.mem_get_info(index)
        gpus.append(Gpu(name, total / 2**30, free / 2**30))
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    backends = {  # name: version, "" without one, None if torch is built without it
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "gloo": "" if gloo else None,
    }
    return {"device": device, "gpus": gpus, "backends": backends}


def has_bf16(cpu_info: Path) -> bool | None:
    """Whether a CPU has instructions for bf16: AVX512-BF16, AMX, or those of ARM. None: unknown.

    cpu_info: as Linux writes it.
    """
    with contextlib.suppress(OSError):
        return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpu_info.read_text()) is not None
    return None


def count_links(topology: str) -> dict[str, int]:
    """Pairs of GPUs by the kind of link between them.

    topology: the table that `nvidia-smi topo -m` prints. Its header is indented.
    """
    rows = [line.split()[1:] for line in topology.splitlines() if line.startswith("GPU")]
    return Counter(kind for index, row in enumerate(rows) for kind in row[index + 1 : len(rows)])


def write_speed(folder: Path, mib: int = 16) -> float | None:
    """MiB/s that reach the disk, with fsync as for a checkpoint; None if writing fails."""
    content = os.urandom(mib * 2**20)  # some file systems do not store zeros
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        file.write(content)
        os.fsync(file.fileno())
        return mib / (time.perf_counter() - started)
    return None


def port_in_use(port: int) -> bool:
    """Whether a server cannot listen on a port on all IPv4 and IPv6 addresses, as torch's does."""
    dual = socket.has_dualstack_ipv6()
    with contextlib.suppress(OSError, OverflowError):
        socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
        ).close()
        return False
    return True


def reachable_addresses(host: str) -> list[str]:
    """The addresses of a host name that other machines could reach."""
    found = set()
    with contextlib.suppress(OSError):
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return sorted(str(address) for address in found if not (address.is_loopback or address.is_link_local))


def choices(facts: SimpleNamespace) -> list[tuple[str, str, str]]:
    """The configs that work here as (name, why, command), the recommended one first."""
    count, cuda = len(facts.gpus), facts.device == "cuda"
    several = cuda and count > 1
    script, has_our_flags = facts.example
    machines = number(facts.configs.get("multi_node"), "num_machines", 2)
    address = (facts.addresses or ["ADDRESS_OF_MACHINE_0"])[0]
    port = "--main_process_port 0 " if DEFAULT_PORT in facts.used_ports else ""  # 0: a free port
    many = f"--num_processes {machines * count} --main_process_ip {address} --machine_rank 0 "
    batch = many_batch = ""
    if has_our_flags:  # a batch size that every number of GPUs divides, unlike the default
        batch = f" --batch_size {128 * count}"
        many_batch = f" --output_dir runs/{machines}_machines --batch_size {128 * machines * count}"
    one_gpu = "the first GPU only, the others stay free" if count > 1 else "there is one GPU"
    table = [  # works, name, why, flags of the launcher, flags of the script
        (several, "ddp", f"a process on each of {count} GPUs: the fastest", port, batch),
        (several, "dp", f"one process for {count} GPUs: slower, for comparison", "", batch),
        (several, "fsdp", f"a model too large for one GPU, sharded over {count}", port, batch),
        (count > 0, "single_gpu", one_gpu, "", ""),
        (cuda, "multi_node", f"{machines} such machines, each its --machine_rank", many, many_batch),
        (True, "cpu", "a first run, no GPU is used" if count else "torch sees no GPU", "", ""),
        (True, "cpu_ddp", "DistributedDataParallel without a GPU, to learn or test", port, ""),
    ]
    launch = "accelerate launch --config_file accelerate_configs"
    return [
        (name, why, f"{launch}/{name}.yaml {launcher_flags}{script}{flags}")
        for works, name, why, launcher_flags, flags in table
        if works and name in facts.configs
    ]


def traps(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    """The problems as (whether a run would fail or go wrong, one sentence with what to do)."""
    yield from package_traps(facts)
    yield from hardware_traps(facts)
    yield from setting_traps(facts)


def package_traps(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    from packaging.version import Version

    required, versions = {requirement.name for requirement in facts.requirements}, facts.versions
    install = "pip install -r requirements.txt" if required else f"pip install {' '.join(NEEDED)}"
    for name in NEEDED:
        if name not in required and versions.get(name) is None:
            yield True, f"{name} is not installed: pip install {name}"
    for requirement in facts.requirements:
        name, version, needed = requirement.name, versions[requirement.name], requirement.name not in TEST_PACKAGES
        if version is None:
            yield needed, f"{name} is not installed: {install}"
        elif not requirement.specifier.contains(version, prereleases=True):
            older = any(Version(version) < Version(bound.version.removesuffix(".*")) for bound in requirement.specifier)
            yield needed and older, f"{name} {version} is not the tested {requirement.specifier}: {install}"
    for name, error in facts.broken.items():
        # If torch is broken, torchvision and accelerate, which import it, fail with the same error.
        if versions.get(name) and (name == "torch" or "torch" not in facts.broken):
            pair = f"{name} {versions[name]} does not work with torch {versions.get('torch')}"
            yield True, f"{pair} ({error}): install both again, {install} --force-reinstall"


def hardware_traps(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    count = len(facts.gpus)
    if facts.driver_gpus and not count and "torch" not in facts.broken:
        way_out = "update the driver, or install a torch built with CUDA for this driver"
        if "CUDA_VISIBLE_DEVICES" in facts.environment:
            way_out = "unset CUDA_VISIBLE_DEVICES"
        yield True, f"nvidia-smi lists {plural(facts.driver_gpus, 'GPU')}, torch sees none: {way_out}"
    for index, gpu in enumerate(facts.gpus):
        if facts.device != "mps" and gpu.free_gib < gpu.memory_gib / 2:
            free = f"GPU {index} has only {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
            way_out = "end the process that nvidia-smi shows, or pass --gpu_ids without this GPU"
            yield gpu.free_gib < MIN_GPU_GIB, f"{free}: {way_out}"
    workers = count if facts.device == "cuda" else number(facts.configs.get("cpu_ddp"), "num_processes", 2)
    if facts.cores < workers:
        cores = plural(facts.cores, "core")
        yield False, f"{workers} processes would share {cores}: pass a smaller --num_processes"
    if facts.shm_gib is not None and facts.shm_gib < MIN_SHM_GIB:
        shm = f"/dev/shm has {facts.shm_gib * 1024:.0f} MiB free"
        effect = "when it is full, data workers end with a bus error and NCCL does not start"
        yield count > 1, f"{shm}, and {effect}: start the container with --shm-size=8g, or pass --num_workers 0"
    if facts.disk_mib_per_s is None:
        yield True, f"nothing can be written to {facts.folder}: pass an --output_dir that you may write to"
    elif facts.free_disk_gib < MIN_DISK_GIB:
        yield False, f"{facts.folder} has {facts.free_disk_gib:.2f} GiB free: pass an --output_dir on another disk"
    elif facts.disk_mib_per_s < MIN_DISK_MIB_PER_S:
        slow = f"{facts.folder} is written at {facts.disk_mib_per_s:.1f} MiB/s, which delays checkpoints"
        yield False, f"{slow}: pass an --output_dir on a local disk"


def setting_traps(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    cuda = facts.device == "cuda"
    for setting in sorted(f"{name}={value}" for name, value in facts.environment.items()):
        for pattern, where, effect in VARIABLES:
            if re.fullmatch(pattern, setting):
                fails = where == "everywhere" or (where == "on a GPU" and len(facts.gpus) > 0)
                yield fails, f"{setting} in the environment {effect}: unset it, if it is not meant"
                break
    if not facts.configs:
        yield True, "accelerate_configs has no .yaml file: copy it from where the scripts are from"
    for name, config in facts.configs.items():
        if config is None:
            yield True, f"accelerate_configs/{name}.yaml cannot be read: repair it"
    if "cpu_ddp" in facts.configs and "ACCELERATE_USE_CPU" not in facts.environment:
        for script in facts.own_accelerators:
            effect = f"{script} calls Accelerator() without cpu=True, and each process of cpu_ddp.yaml"
            way_out = "write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true"
            yield False, f"{effect} would train a model of its own: {way_out}"
    if facts.default_config:
        path, config = facts.default_config
        keys = ("distributed_type", "num_machines", "num_processes", "use_cpu", "mixed_precision")
        shown = ", ".join(f"{key} {config[key]}" for key in keys if key in config) if config else "cannot be read"
        effect = "is used without a message if --config_file is missing"
        yield False, f"{path} ({shown}) {effect}: always pass --config_file, or delete that file"
    for port in facts.used_ports:
        users = [c for c in facts.configs.values() if number(c, "main_process_port", DEFAULT_PORT) == port]
        fails = cuda and any(number(config, "num_machines", 1) > 1 for config in users)
        several = "for several machines, pass another port, which must be free on machine 0"
        yield fails, f"port {port} is in use: pass --main_process_port 0, which chooses a free one; {several}"
    if cuda and not facts.addresses:
        effect = f"the name of this machine, {facts.host}, has no address that others can reach"
        yield False, f"{effect}: for several machines, pass addresses, not names"


def hardware(facts: SimpleNamespace) -> Iterator[tuple[str, str]]:
    """The rows about the machine as (name, text)."""
    if not facts.gpus:
        yield "GPU", "none that torch sees"
    for name, total in dict.fromkeys(gpu[:2] for gpu in facts.gpus):
        free = [f"{gpu.free_gib:.1f}" for gpu in facts.gpus if gpu[:2] == (name, total)]
        yield "GPU", f"{len(free)} x {name}, {total:.1f} GiB each, free: {' '.join(free)}"
    if facts.links:
        links = ", ".join(f"{pairs} pairs by {kind}" for kind, pairs in facts.links.items())
        yield "links", f"{links} (NV: NVLink; PIX, PXB, PHB, NODE: PCIe; SYS: CPU to CPU)"
    bf16 = {True: ", bf16: twice as fast for convolutions", False: ", bf16: slower than float32"}
    yield "CPU", plural(facts.cores, "core") + bf16.get(facts.cpu_has_bf16, "")
    shared = "" if facts.shm_gib is None else f", /dev/shm {facts.shm_gib:.2f} GiB free"
    yield "memory", f"{facts.free_memory_gib:.1f} of {facts.memory_gib:.1f} GiB free{shared}"
    speed = f"{facts.disk_mib_per_s:,.0f} MiB/s" if facts.disk_mib_per_s else "nothing can be written"
    yield "disk", f"{facts.free_disk_gib:.0f} GiB free in {facts.folder}, {speed}"
    expected = {*NEEDED, *(requirement.name for requirement in facts.requirements)}
    versions = {name: facts.versions.get(name) for name in PACKAGES}
    shown = [f"{name} {version or 'missing'}" for name, version in versions.items() if version or name in expected]
    yield "versions", ", ".join([f"python {platform.python_version()}", *shown])
    backends = [f"{name} {version}".strip() for name, version in facts.backends.items() if version is not None]
    yield "torch with", ", ".join(backends) or "nothing: it cannot be imported"


def report(facts: SimpleNamespace, found: list[tuple[bool, str]], colour: bool = False) -> str:
    """The page to print: the machine, the configs that work, the problems.

    found: what `traps` returned. colour: use ANSI colours.
    """

    def paint(code, text):
        return f"\033[{code}m{text}\033[0m" if colour else text

    lines = [paint(1, "This machine"), *(f"  {name:<11}{text}" for name, text in hardware(facts))]
    fitting = choices(facts)
    if fitting:
        name, why, command = fitting[0]
        lines += ["", paint(1, f"Use {name}.yaml") + f": {why}", paint(32, f"  {command}")]
    if len(fitting) > 1:
        lines += ["", paint(1, "Or")]
    for name, why, command in fitting[1:]:
        lines += [f"  {name + '.yaml':<16}{why}", f"    {command}"]
    on_gpus = {"ddp", "dp", "fsdp", "single_gpu", "multi_node"} & facts.configs.keys()
    others = on_gpus - {name for name, *_ in fitting}
    if others:
        need = "several GPUs" if facts.device == "cuda" else "NVIDIA or AMD GPUs"
        lines.append(f"  not here: {', '.join(sorted(others))} (needs {need})")
    lines += ["", paint(1, "Problems" if found else "No problems found")]
    for fails, sentence in sorted(found, key=lambda trap: not trap[0]):
        lines.append(f"  {paint(31, 'error  ') if fails else paint(33, 'warning')}  {sentence}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    runs = "where runs will be written; its disk is tested (default: ./runs)"
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help=runs)
    folder = parser.parse_args().output_dir.absolute()
    while not os.path.exists(folder):  # a run makes the folders that are missing
        folder = folder.parent
    try:
        facts = gather(folder)
    except ImportError as error:
        install = f"pip install {'pyyaml' if error.name == 'yaml' else error.name}"
        if (ROOT / "requirements.txt").is_file():
            install = "pip install -r requirements.txt"
        stop(f"{error.name} is not installed, and is needed here: {install}")
    found = list(traps(facts))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(report(facts, found, colour))
    return int(any(fails for fails, _ in found))
