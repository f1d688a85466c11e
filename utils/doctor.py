"""Look at this machine: what is there, which config fits, the command to copy, and the traps on the way.

    python -m utils.doctor

Ends with 0 if nothing stands in the way, warnings included; with 1 if a run would fail or go wrong. Changes nothing.
"""

import argparse
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

from utils import stop

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_PORT = 29500  # Accelerate's, where neither a flag nor the config names one
MIN_SHM_GIB, MIN_GPU_GIB, MIN_DISK_GIB, MIN_DISK_MIB_PER_S = 1, 2, 1, 20
PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate")
TEST_PACKAGES = ("pytest", "pytest-xdist", "ruff")  # no run needs them
VARIABLES = (  # NAME=value as an expression, where a run goes wrong, why; the first that fits
    ("WORLD_SIZE=(?!1$).*|LOCAL_RANK=.*", "everywhere", "makes a process look for others that nobody started"),
    ("ACCELERATE_TORCH_DEVICE=.*", "everywhere", "overrides the config file"),
    ("ACCELERATE_USE_.*", "on a GPU", "overrides the config file"),
    ("WORLD_SIZE=1|RANK=.*", "", "is a leftover of another launcher"),
    ("ACCELERATE_.*", "", "is read by Accelerate beside the config file"),
    ("NCCL_.*", "", "changes how GPUs talk, also in runs it was not meant for"),
    ("CUDA_VISIBLE_DEVICES=.*", "", "chooses the GPUs that torch sees, and numbers them anew"),
    ("OMP_NUM_THREADS=.*", "", "limits NumPy, and not torch, whose threads the scripts set"),
)


class Gpu(NamedTuple):
    name: str
    memory_gib: float
    free_gib: float


def gather(folder: Path) -> SimpleNamespace:
    """The facts: all that the other functions know of the machine. `folder`: where runs will be written."""
    import psutil
    from packaging.requirements import Requirement

    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("-")]
    configs = {path.stem: read_yaml(path) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
    ports = {number(config, "main_process_port", DEFAULT_PORT) for config in configs.values()}
    memory, host = psutil.virtual_memory(), socket.gethostname()
    broken = {name: error for name in ("torch", "torchvision", "accelerate") if (error := import_error(name))}
    device, gpus, backends = ("cpu", [], {}) if "torch" in broken else ask_torch(memory)
    return SimpleNamespace(
        device=device,  # that torch would take: "cuda", "mps", "cpu", ...
        gpus=gpus,  # that torch sees
        driver_gpus=output_of("nvidia-smi", "-L").count("GPU-"),  # those hidden from torch included
        links=count_links(output_of("nvidia-smi", "topo", "-m")),  # kind: pairs of GPUs
        backends=backends,  # name: version, or "" if it has none; None if torch is built without
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_gib=memory.total / 2**30,
        free_memory_gib=memory.available / 2**30,
        folder=str(folder),
        free_disk_gib=shutil.disk_usage(folder).free / 2**30,
        disk_mib_per_s=write_speed(folder),  # None: nothing can be written there
        shm_gib=shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else None,
        requirements=requirements,
        versions={one.name: installed_version(one.name) for one in requirements},  # None: not installed
        broken=broken,  # package: why it cannot be imported
        environment=dict(os.environ),
        default_config=None if "accelerate" in broken else default_config(),  # path and content
        configs=configs,  # None: cannot be read
        used_ports=[port for port in sorted(ports) if port_in_use(port)],
        host=host,
        addresses=reachable_addresses(host),  # by which other machines could find this one
    )


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
    """What a program prints; nothing if it is not there, fails, or hangs, as nvidia-smi does with a broken GPU."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def import_error(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except Exception as error:  # any: libraries that do not fit raise OSError, RuntimeError, AttributeError, ...
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ask_torch(memory) -> tuple[str, list[Gpu], dict[str, str | None]]:
    """Its device, the GPUs it sees, and how processes can talk. `memory`: psutil's, which Apple's GPU shares."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    device, gpus = found.type if found else "cpu", []
    for index in range(torch.accelerator.device_count() if found else 0):
        if device == "mps":
            name, free, total = "Apple GPU", memory.available, memory.total
        else:
            module = torch.get_device_module(device)
            name, total = module.get_device_name(index), module.get_device_properties(index).total_memory
            try:
                free, _ = module.mem_get_info(index)
            except RuntimeError:  # it takes some memory to ask, and not even that is free
                free = 0
        gpus.append(Gpu(name, total / 2**30, free / 2**30))
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None
    return device, gpus, {"CUDA": torch.version.cuda, "NCCL": nccl_version, "gloo": "" if gloo else None}


def count_links(topology: str) -> dict[str, int]:
    """Pairs of GPUs by the kind of link between them, from the table that `nvidia-smi topo -m` prints."""
    rows = [line.split()[1:] for line in topology.splitlines() if line.startswith("GPU")]  # the header is indented
    return Counter(row[other] for index, row in enumerate(rows) for other in range(index + 1, len(rows)))


def write_speed(folder: Path, mib: int = 16) -> float | None:
    """MiB/s that reach the disk, with the fsync that a checkpoint waits for; None where nothing can be written."""
    content = os.urandom(mib * 2**20)  # zeros are not stored by some file systems
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            started = time.perf_counter()
            file.write(content)
            os.fsync(file.fileno())
            return mib / (time.perf_counter() - started)
    except OSError:
        return None


def port_in_use(port: int) -> bool:
    """Whether a server cannot listen on it, on all addresses of IPv4 and IPv6, as torch's rendezvous does."""
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except (OSError, OverflowError):
        return True
    return False


def reachable_addresses(host: str) -> list[str]:
    try:
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return []
    return sorted(str(address) for address in found if not (address.is_loopback or address.is_link_local))


def choices(facts: SimpleNamespace) -> list[tuple[str, str, str]]:
    """The configs that run here as (name, why, command), the one to take first."""
    count, cuda = len(facts.gpus), facts.device == "cuda"
    port = "--main_process_port 0 " if DEFAULT_PORT in facts.used_ports else ""  # 0: a free one
    batch = f" --batch_size {128 * count}"  # divides by any number of GPUs, as the default does not
    machines = number(facts.configs.get("multi_node"), "num_machines", 2)
    address = (facts.addresses or ["ADDRESS_OF_MACHINE_0"])[0]
    many = f"--num_processes {machines * count} --main_process_ip {address} --machine_rank 0 "
    many_batch = f" --output_dir runs/{machines}_machines --batch_size {128 * machines * count}"
    alone = "the first GPU alone, the others stay free" if count > 1 else "there is one GPU"
    more = cuda and count > 1
    table = [  # fits, name, why, flags of the launcher, flags of the script
        (more, "ddp", f"a process on each of {count} GPUs, fastest where one holds the model", port, batch),
        (more, "dp", f"one process over {count} GPUs: slower, to compare", "", batch),
        (more, "fsdp", f"a model too large for one GPU, cut over {count}", port, batch),
        (count > 0, "single_gpu", alone, "", ""),
        (cuda, "multi_node", f"{machines} such machines; each has its own --machine_rank", many, many_batch),
        (True, "cpu", "a first look, the GPUs stay free" if count else "torch sees no GPU", "", ""),
        (True, "cpu_ddp", "DistributedDataParallel without a GPU, to learn and to test", port, ""),
    ]
    launch = "accelerate launch --config_file accelerate_configs/{}.yaml {}scripts/mnist_mlp.py{}"
    return [(name, why, launch.format(name, *flags)) for fits, name, why, *flags in table if fits]


def traps(facts: SimpleNamespace) -> Iterator[tuple[bool, str]]:
    """What stands in the way, each as (whether a run would fail or go wrong, a sentence with what to do)."""
    from packaging.version import Version

    install = "pip install -r requirements.txt"
    for one in facts.requirements:
        version, needed = facts.versions[one.name], one.name not in TEST_PACKAGES
        if version is None:
            yield needed, f"{one.name} is not installed: {install}"
        elif not one.specifier.contains(version, prereleases=True):
            older = Version(version) < max(Version(bound.version.removesuffix(".*")) for bound in one.specifier)
            yield needed and older, f"{one.name} {version} is not the {one.specifier} that was tested: {install}"
    for name, error in facts.broken.items():
        if facts.versions.get(name) and (name == "torch" or "torch" not in facts.broken):  # the others import torch
            pair = f"{name} {facts.versions[name]} does not work with torch {facts.versions.get('torch')}"
            yield True, f"{pair} ({error}): install both anew, {install} --force-reinstall"

    count = len(facts.gpus)
    if facts.driver_gpus and not count and "torch" not in facts.broken:
        old = "update the driver, or install a torch that is built with CUDA and for this driver"
        cause = "unset CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in facts.environment else old
        yield True, f"nvidia-smi lists {facts.driver_gpus} GPUs, and torch sees none: {cause}"
    for index, gpu in enumerate(facts.gpus):
        if facts.device != "mps" and gpu.free_gib < gpu.memory_gib / 2:
            free = f"GPU {index} has {gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free, something else holds the rest"
            yield gpu.free_gib < MIN_GPU_GIB, f"{free}: end it (nvidia-smi names it) or pass --gpu_ids without {index}"
    workers = count if facts.device == "cuda" else number(facts.configs.get("cpu_ddp"), "num_processes", 2)
    if facts.cores < workers:
        yield False, f"{workers} processes would share {facts.cores} cores: pass a smaller --num_processes"

    for setting in sorted(f"{name}={value}" for name, value in facts.environment.items()):
        for pattern, where, effect in VARIABLES:
            if re.fullmatch(pattern, setting):
                fails = where == "everywhere" or (where == "on a GPU" and count > 0)
                yield fails, f"{setting} in the environment {effect}: unset it, unless you mean it"
                break
    for name in (name for name, config in facts.configs.items() if config is None):
        yield True, f"accelerate_configs/{name}.yaml cannot be read: mend it"
    if facts.default_config:
        path, config = facts.default_config
        keys = ("distributed_type", "num_machines", "num_processes", "use_cpu", "mixed_precision")
        says = ", ".join(f"{key} {config[key]}" for key in keys if key in config) if config else "and cannot be read"
        yield False, f"{path} ({says}) is taken silently where --config_file is missing: always pass it, or delete this"
    for port in facts.used_ports:
        owners = [one for one in facts.configs.values() if number(one, "main_process_port", DEFAULT_PORT) == port]
        stops = facts.device == "cuda" and any(number(one, "num_machines", 1) > 1 for one in owners)
        several = "on several machines a run would stop, and needs another port that is free on the first"
        yield stops, f"port {port} is in use: pass --main_process_port 0, which finds a free one; {several}"
    if facts.device == "cuda" and not facts.addresses:
        yield False, f"no other machine can reach this one by its name, {facts.host}: pass addresses, not names"

    if facts.shm_gib is not None and facts.shm_gib < MIN_SHM_GIB:
        full = "once it is full, data workers die of a bus error and NCCL does not start"
        shm = f"/dev/shm has {facts.shm_gib * 1024:.0f} MiB free, and {full}"
        yield count > 1, f"{shm}: start the container with --shm-size=8g; for the workers, --num_workers 0 will do"
    if facts.disk_mib_per_s is None:
        yield True, f"nothing can be written to {facts.folder}: pass an --output_dir that is yours"
    elif facts.free_disk_gib < MIN_DISK_GIB:
        yield False, f"{facts.folder} has {facts.free_disk_gib:.2f} GiB free: pass an --output_dir on another disk"
    elif facts.disk_mib_per_s < MIN_DISK_MIB_PER_S:
        slow = f"{facts.folder} takes {facts.disk_mib_per_s:.1f} MiB/s, and a run waits for each checkpoint"
        yield False, f"{slow}: pass an --output_dir on a local disk"


def report(facts: SimpleNamespace, found: list[tuple[bool, str]], colour: bool = False) -> str:
    """The page to print: the machine, the configs that fit, the traps."""

    def paint(code, text):
        return f"\033[{code}m{text}\033[0m" if colour else text

    rows = [] if facts.gpus else [("GPU", "none that torch sees")]
    for name, total in dict.fromkeys(gpu[:2] for gpu in facts.gpus):
        free = [f"{gpu.free_gib:.1f}" for gpu in facts.gpus if gpu[:2] == (name, total)]
        rows.append(("GPU", f"{len(free)} x {name}, {total:.1f} GiB each, free: {' '.join(free)}"))
    if facts.links:
        links = ", ".join(f"{pairs} pairs by {kind}" for kind, pairs in facts.links.items())
        rows.append(("links", f"{links} (NV: NVLink; PIX, PXB, PHB, NODE: PCIe; SYS: from CPU to CPU)"))
    shared = "" if facts.shm_gib is None else f", /dev/shm {facts.shm_gib:.2f} GiB free"
    speed = f"{facts.disk_mib_per_s:,.0f} MiB/s" if facts.disk_mib_per_s else "nothing can be written"
    versions = {"python": platform.python_version(), **{name: facts.versions.get(name) for name in PACKAGES}}
    backends = [f"{name} {version}".strip() for name, version in facts.backends.items() if version is not None]
    rows += [
        ("CPU", f"{facts.cores} cores"),
        ("memory", f"{facts.free_memory_gib:.1f} of {facts.memory_gib:.1f} GiB free{shared}"),
        ("disk", f"{facts.free_disk_gib:.0f} GiB free in {facts.folder}, {speed}"),
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())),
        ("torch with", ", ".join(backends) or "nothing: it cannot be imported"),
    ]
    lines = [paint(1, "This machine"), *(f"  {name:<11}{text}" for name, text in rows)]

    fitting = choices(facts)
    lines += ["", paint(1, f"Take {fitting[0][0]}.yaml") + f": {fitting[0][1]}", paint(32, f"  {fitting[0][2]}")]
    lines += ["", paint(1, "Or")]
    for name, why, command in fitting[1:]:
        lines += [f"  {name + '.yaml':<16}{why}", f"    {command}"]
    others = {"ddp", "dp", "fsdp", "single_gpu", "multi_node"} - {name for name, *_ in fitting}
    need = "several GPUs" if facts.device == "cuda" else "NVIDIA or AMD GPUs"
    lines += [f"  not here: {', '.join(sorted(others))} ({need})"] if others else []

    lines += ["", paint(1, "Traps" if found else "No traps found")]
    for fails, sentence in sorted(found, key=lambda trap: not trap[0]):
        lines.append(f"  {paint(31, 'error  ') if fails else paint(33, 'warning')}  {sentence}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m utils.doctor", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, help="where runs will go; its disk is tried (default: ./runs)")
    folder = (parser.parse_args().output_dir or Path("runs")).absolute()
    folder = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))  # a run makes the rest
    try:
        facts = gather(folder)
    except ImportError as error:
        stop(f"{error.name} is not installed, and no run can do without: pip install -r requirements.txt")
    found = list(traps(facts))
    print(report(facts, found, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return int(any(fails for fails, _ in found))


if __name__ == "__main__":
    sys.exit(main())
