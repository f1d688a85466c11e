"""Problems are made for real where this machine allows it; other machines are given as facts."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT, free_port
from packaging.requirements import Requirement

from utils import doctor

CONFIGS = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what the doctor reads of this project, to be changed."""
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    for name in list(os.environ):
        if any(re.fullmatch(pattern, f"{name}={os.environ[name]}") for pattern, *_ in doctor.VARIABLES):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(scope="module")
def real() -> dict:
    return vars(doctor.gather(ROOT))


@pytest.fixture
def machine(real):
    """`machine(8, ...)`: the facts of a machine without problems, except for the changes given."""

    def machine(count=0, device=None, /, **changes):
        clean = {
            "device": device or ("cuda" if count else "cpu"),
            "gpus": [doctor.Gpu("NVIDIA H100 80GB HBM3", 79.2, 78.6)] * count,
            "driver_gpus": count if device is None else 0,
            "links": {"NV18": count * (count - 1) // 2} if count > 1 else {},
            "backends": {"CUDA": "13.2", "NCCL": "2.30.7", "gloo": ""},
            "cores": 64,
            "cpu_has_bf16": None,
            "free_disk_gib": 500,
            "disk_mib_per_s": 900,
            "shm_gib": 32,
            "requirements": [],
            "broken": {},
            "environment": {"HOME": "/home/me", "FRANK": "1"},
            "default_config": None,
            "used_ports": [],
            "host": "node0",
            "addresses": ["10.0.0.7"],
            "own_accelerators": [],
        }
        return SimpleNamespace(**{**real, **clean, **changes})

    return machine


def sentences(facts, fails) -> list[str]:
    return [sentence for bad, sentence in doctor.traps(facts) if bad == fails]


def test_what_is_gathered_is_what_is_there(tmp_path):
    facts = doctor.gather(tmp_path)
    assert len(facts.gpus) == torch.accelerator.device_count()
    found = torch.accelerator.current_accelerator(check_available=True)
    assert facts.device == (found.type if found else "cpu")
    assert facts.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts.backends["gloo"] == ""
    assert set(facts.configs) == CONFIGS
    assert 0 < facts.free_memory_gib < facts.memory_gib
    assert facts.free_disk_gib == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, rel=0.2)
    assert facts.disk_mib_per_s > 0
    assert 1 <= facts.cores <= os.cpu_count()
    assert facts.broken == {}
    assert (ROOT / facts.example[0]).is_file()
    assert facts.own_accelerators == []
    assert not list(tmp_path.iterdir())


def test_as_a_user_runs_it(tmp_path):
    """A default config, variables of another launcher, no colours in a pipe; exit code 1."""
    config = tmp_path / "accelerate" / "default_config.yaml"
    config.parent.mkdir()
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 16\nmixed_precision: fp16\n")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "WORLD_SIZE": "4"}
    words = [sys.executable, "-m", "utils.doctor", "--output_dir", tmp_path / "runs" / "new"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    [warning] = [line for line in lines if str(config) in line]
    assert "warning" in warning
    assert "distributed_type MULTI_GPU, num_processes 16, mixed_precision fp16" in warning
    [error] = [line for line in lines if "WORLD_SIZE=4" in line]
    assert "error" in error
    assert lines.index(error) < lines.index(warning)
    assert f"free in {tmp_path}," in done.stdout
    assert "\033" not in done.stdout
    assert not (tmp_path / "runs").exists()


def test_looking_costs_no_import_before_it_is_needed():
    heavy = {"torch", "torchvision", "accelerate", "yaml", "psutil"}
    code = f"import sys, utils.doctor; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_exit_code_and_colours(machine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(doctor, "gather", lambda folder: machine())
    assert doctor.main() == 0
    assert "No problems found" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "gather", lambda folder: machine(disk_mib_per_s=3))
    assert doctor.main() == 0
    assert "warning" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "gather", lambda folder: machine(disk_mib_per_s=None))
    assert doctor.main() == 1
    assert "\033" not in capsys.readouterr().out
    terminal, screen = os.openpty()
    with os.fdopen(screen, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert doctor.main() == 1
    seen = b""
    with contextlib.suppress(OSError):  # Linux: the end of what a terminal had to say
        while part := os.read(terminal, 10_000):
            seen += part
    os.close(terminal)
    assert b"\033[31merror" in seen


def test_without_the_packages_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(SystemExit) as stopped:
        doctor.main()
    assert stopped.value.code == 2
    assert "psutil is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "device", "names"),
    [
        (0, None, ["cpu", "cpu_ddp"]),
        (1, "mps", ["single_gpu", "cpu", "cpu_ddp"]),
        (1, None, ["single_gpu", "multi_node", "cpu", "cpu_ddp"]),
        (2, None, ["ddp", "dp", "fsdp", "single_gpu", "multi_node", "cpu", "cpu_ddp"]),
    ],
)
def test_configs_that_fit(machine, gpus, device, names):
    facts = machine(gpus, device)
    assert [name for name, *_ in doctor.choices(facts)] == names
    page = doctor.report(facts, list(doctor.traps(facts)))
    assert f"Use {names[0]}.yaml" in page
    assert "No problems found" in page
    shown = page.partition("not here: ")
    others = set(shown[2].partition(" (")[0].split(", ")) - {""}
    assert set(names) | others == CONFIGS


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize("used_ports", [[], [29500]])
def test_commands_are_accepted_by_the_launcher(machine, gpus, used_ports):
    for name, _, command in doctor.choices(machine(gpus, used_ports=used_ports)):
        words = shlex.split(command)
        assert words[:2] == ["accelerate", "launch"]
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert options.config_file == f"accelerate_configs/{name}.yaml"
        assert (ROOT / options.training_script).is_file()
        flags = options.training_script_args
        values = dict(zip(flags[::2], flags[1::2], strict=True))
        processes = {"multi_node": 2 * gpus, "cpu_ddp": 2, "single_gpu": 1, "cpu": 1}
        assert int(values.get("--batch_size", 256)) % processes.get(name, gpus) == 0
        if name == "multi_node":
            assert (options.num_processes, options.num_machines) == (2 * gpus, 2)
            assert options.main_process_ip == "10.0.0.7"
        elif name in ("ddp", "fsdp", "cpu_ddp"):
            assert options.main_process_port == (0 if used_ports else None)


def test_a_machine_with_8_gpus_on_one_page(machine):
    page = doctor.report(machine(8), [])
    assert "8 x NVIDIA H100 80GB HBM3, 79.2 GiB each, free: 78.6 78.6" in page
    assert "28 pairs by NV18" in page
    assert "scripts/mnist_mlp.py --batch_size 1024" in page
    assert "--num_processes 16 --main_process_ip 10.0.0.7" in page
    assert "not here" not in page


HIDDEN = {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "driver_gpus": 8}


@pytest.mark.parametrize(
    ("gpus", "changes", "fails", "sentence"),
    [
        (0, {"driver_gpus": 8}, True, "lists 8 GPUs, torch sees none: update the driver"),
        (0, HIDDEN, True, "lists 8 GPUs, torch sees none: unset CUDA_VISIBLE_DEVICES"),
        (1, {"gpus": [doctor.Gpu("A100", 40, 1.5)]}, True, "GPU 0 has only 1.5 of 40.0 GiB free"),
        (1, {"gpus": [doctor.Gpu("A100", 40, 15)]}, False, "GPU 0 has only 15.0 of 40.0 GiB free"),
        (8, {"cores": 4}, False, "8 processes would share 4 cores"),
        (0, {"cores": 1}, False, "2 processes would share 1 core:"),
        (8, {"shm_gib": 0.0625}, True, "/dev/shm has 64 MiB free"),
        (0, {"shm_gib": 0.0625}, False, "/dev/shm has 64 MiB free"),
        (0, {"free_disk_gib": 0.5}, False, "has 0.50 GiB free"),
        (8, {"addresses": []}, False, "this machine, node0, has no address"),
        (8, {"used_ports": [29500]}, True, "port 29500 is in use"),
        (0, {"used_ports": [29500]}, False, "port 29500 is in use"),
        (0, {"default_config": ("/home/me/x.yaml", None)}, False, "x.yaml (cannot be read)"),
        (0, {"own_accelerators": ["train.py"]}, False, "train.py calls Accelerator() without cpu"),
        (0, {"configs": {}}, True, "accelerate_configs has no .yaml file"),
        (0, {"environment": {"WORLD_SIZE": "16"}}, True, "WORLD_SIZE=16 in the environment"),
        (0, {"environment": {"WORLD_SIZE": "1"}}, False, "WORLD_SIZE=1 in the environment"),
        (0, {"environment": {"RANK": "1"}}, False, "RANK=1 in the environment"),
        (0, {"environment": {"LOCAL_RANK": "0"}}, True, "LOCAL_RANK=0 in the environment"),
        (0, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, False, "ACCELERATE_USE_FSDP=true"),
        (1, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, True, "ACCELERATE_USE_FSDP=true"),
        (0, {"environment": {"ACCELERATE_TORCH_DEVICE": "cpu"}}, True, "TORCH_DEVICE=cpu"),
        (0, {"environment": {"ACCELERATE_MIXED_PRECISION": "fp16"}}, False, "PRECISION=fp16"),
        (8, {"environment": {"NCCL_P2P_DISABLE": "1"}}, False, "NCCL_P2P_DISABLE=1"),
        (8, {"environment": {"CUDA_VISIBLE_DEVICES": "3"}}, False, "CUDA_VISIBLE_DEVICES=3"),
        (0, {"environment": {"OMP_NUM_THREADS": "64"}}, False, "OMP_NUM_THREADS=64"),
    ],
)
def test_a_problem_in_the_facts(machine, gpus, changes, fails, sentence):
    facts = machine(gpus, **changes)
    assert [found for found in sentences(facts, fails) if sentence in found and ": " in found]
    assert not [found for found in sentences(facts, not fails) if sentence in found]
    others = 1 if changes is HIDDEN else 0  # the variable itself is one more
    assert len(list(doctor.traps(facts))) == 1 + others


def test_what_is_no_problem(machine):
    """No address, without GPUs; little free memory, on an Apple GPU; one core for one GPU."""
    assert not list(doctor.traps(machine(addresses=[])))
    assert not list(doctor.traps(machine(1, "mps", gpus=[doctor.Gpu("Apple GPU", 16, 3)], shm_gib=None)))
    assert not list(doctor.traps(machine(1, cores=1)))


def test_requirements_that_are_not_met(project, machine):
    lines = ["# tested", "torch~=9.0", "no-such-package>=1  # gone", "", "ruff~=9.0"]
    lines += ["psutil<1", "PyYAML>=1", "-e .", "accelerate", "x @ https://example.org/x.whl"]
    (project / "requirements.txt").write_text("\n".join(lines))
    found = doctor.gather(project)
    facts = machine(requirements=found.requirements, versions=found.versions)
    torch_is_older, missing = sentences(facts, True)
    assert torch_is_older.startswith(f"torch {found.versions['torch']} is not the tested ~=9.0")
    assert missing.startswith("no-such-package is not installed")
    assert [sentence.split()[0] for sentence in sentences(facts, False)] == [
        "ruff",
        "psutil",
    ]  # only for tests; newer than the bound


@pytest.mark.parametrize("build", ["2.15.0+cpu", "2.15.1rc1"])
def test_builds_that_satisfy_their_release(machine, real, build):
    facts = machine(requirements=[Requirement("torch~=2.15.0")], versions={**real["versions"], "torch": build})
    assert not list(doctor.traps(facts))


def test_torchvision_that_does_not_fit_torch(project, machine, monkeypatch):
    """As with a torchvision built for another torch: its library does not define its operators."""
    package = project / "path" / "torchvision"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "import torch\n@torch.library.register_fake('torchvisio::nms')\ndef f():..."
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    facts = machine(broken=doctor.gather(project).broken)
    [sentence] = sentences(facts, True)
    assert sentence.startswith("torchvision")
    assert "RuntimeError: operator torchvisio::nms does not exist" in sentence


def test_a_broken_torch_is_one_problem_and_there_is_still_a_page(project, machine, monkeypatch):
    monkeypatch.setattr(doctor, "import_error", lambda name: "OSError: libcudart.so.13: cannot open")
    found = doctor.gather(project)
    facts = machine(broken=found.broken, device=found.device, backends=found.backends)
    [sentence] = sentences(facts, True)
    assert sentence.startswith("torch ")
    assert "cannot be imported" in doctor.report(facts, [])


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_in_use(project, monkeypatch, family, address):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = free_port()
    monkeypatch.setattr(doctor, "DEFAULT_PORT", port)
    assert port not in doctor.gather(project).used_ports
    with socket.create_server((address, port), family=family):
        facts = doctor.gather(project)
        assert port in facts.used_ports
        assert [found for _, found in doctor.traps(facts) if f"port {port} is in use" in found]


def test_the_port_of_a_config_is_tried_too(project):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        path = project / "accelerate_configs" / "multi_node.yaml"
        path.write_text(path.read_text().replace("29500", str(port)))
        assert port in doctor.gather(project).used_ports


@pytest.mark.parametrize(
    "text", ["num_processes: [", "", "just words", "main_process_port: '29500'\nnum_machines: two"]
)
def test_a_config_that_cannot_be_read(project, text):
    (project / "accelerate_configs" / "multi_node.yaml").write_text(text)
    facts = doctor.gather(project)
    unreadable = [found for found in sentences(facts, True) if "multi_node.yaml cannot be read" in found]
    assert len(unreadable) == ("num_machines" not in text)
    assert doctor.report(facts, [])


def test_no_default_config_is_no_problem(tmp_path, monkeypatch):
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(path))
    assert doctor.default_config() is None
    path.write_text("num_processes: 3")
    assert doctor.default_config() == (str(path), {"num_processes": 3})


def test_slow_and_closed_disks(project, machine, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(1))
    facts = machine(disk_mib_per_s=doctor.write_speed(project))
    [sentence] = sentences(facts, False)
    assert f"is written at {facts.disk_mib_per_s:.1f} MiB/s" in sentence
    assert 5 < facts.disk_mib_per_s <= 16
    for closed in (Path("/proc"), project / "requirements.txt"):  # closed to root too; no folder
        speed = doctor.write_speed(closed)
        facts = machine(disk_mib_per_s=speed, free_disk_gib=0, folder=str(closed))
        [sentence] = sentences(facts, True)
        assert sentence.startswith(f"nothing can be written to {closed}: pass an --output_dir")
        assert not sentences(facts, False)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("localhost", []), ("127.0.1.1", []), ("169.254.1.1", []), ("10.1.2.3", ["10.1.2.3"]), ("no such host", [])],
)
def test_addresses_that_others_reach(host, addresses):
    assert doctor.reachable_addresses(host) == addresses


TOPOLOGY = """\
\t\033[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m
GPU0\t X \tNV4\tSYS\tPIX\t0-31\t0\tN/A
GPU1\tNV4\t X \tSYS\tPIX\t0-31\t0\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\tN/A
NIC0\tPIX\tPIX\tSYS\t X \t\t\t

Legend:

  X    = Self
"""


def test_links_between_gpus():
    assert doctor.count_links(TOPOLOGY) == {"NV4": 1, "SYS": 2}
    assert doctor.count_links("") == {}


def test_what_a_missing_or_failing_program_says():
    assert doctor.output_of("no-such-program") == ""
    assert doctor.output_of(sys.executable, "-c", "print(1); raise SystemExit(9)") == ""
    assert doctor.output_of(sys.executable, "-c", "print(1)") == "1\n"


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_gpus_as_torch_reports_them(monkeypatch, device):
    """Apple's GPU has no memory of its own and no `mem_get_info`: the machine's is shown."""
    memory = SimpleNamespace(available=6 * 2**30, total=16 * 2**30)

    def mem_get_info(index):
        if index == 1:
            raise torch.OutOfMemoryError("another process has it all")
        return 2**30, 2**35

    module = SimpleNamespace(
        get_device_name=lambda index: f"card {index}",
        get_device_properties=lambda index: SimpleNamespace(total_memory=2**35),
        mem_get_info=mem_get_info,
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(device))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2 if device == "cuda" else 1)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.__getitem__)
    found = doctor.ask_torch(memory)
    assert found["device"] == device
    assert found["gpus"] == {"cuda": [("card 0", 32, 1), ("card 1", 32, 0)], "mps": [("Apple GPU", 16, 6)]}[device]


PLAIN = "from accelerate import Accelerator\naccelerator = Accelerator()\n"


@pytest.mark.parametrize(
    ("text", "ignores"),
    [
        (PLAIN, True),
        ("import accelerate\na = accelerate.Accelerator(log_with='all')\n", True),
        ("a = Accelerator(cpu=True)\n", False),
        ("a = Accelerator(**flags)\n", False),
        ("# ACCELERATE_USE_CPU=true\n" + PLAIN, False),
        ("accelerator = launch.make_accelerator(args)\n", False),
        ("a = Accelerator(kwargs_handlers=[Kwargs()], cpu=True)\n", False),
        ("# Accelerator()\n", False),
        ("print 'Python 2', Accelerator()\n", False),
    ],
)
def test_a_script_that_ignores_the_cpu_config(text, ignores):
    assert doctor.ignores_cpu_config(text) == ignores


def test_the_warning_about_cpu_ddp_names_the_script(project, machine):
    (project / "train.py").write_text(PLAIN)
    (project / "scripts").mkdir()
    (project / "scripts" / "good.py").write_text("a = Accelerator(cpu=True)")
    found = doctor.gather(project)
    assert found.own_accelerators == ["train.py"]
    facts = machine(own_accelerators=found.own_accelerators, configs=found.configs)
    [sentence] = sentences(facts, False)
    assert sentence.startswith("train.py calls Accelerator() without cpu=True")
    facts.environment["ACCELERATE_USE_CPU"] = "true"
    assert not [found for found in sentences(facts, False) if "cpu=True" in found]
    facts.environment.pop("ACCELERATE_USE_CPU")
    facts.configs.pop("cpu_ddp")
    assert not sentences(facts, False)


def test_the_script_in_the_commands(project, machine):
    def commands():
        facts = machine(2, example=doctor.gather(project).example)
        return {name: command for name, _, command in doctor.choices(facts)}

    assert commands()["ddp"].endswith("ddp.yaml your_script.py")
    (project / "setup.py").write_text("import setuptools")
    (project / "train.py").write_text(PLAIN)
    assert commands()["ddp"].endswith("ddp.yaml train.py")
    (project / "train.py").write_text(PLAIN + "# --batch_size")
    assert commands()["ddp"].endswith("ddp.yaml train.py --batch_size 256")
    (project / "mnist_mlp.py").write_text("")
    assert commands()["ddp"].endswith("ddp.yaml mnist_mlp.py --batch_size 256")


def test_only_configs_that_exist_are_shown(machine, real):
    configs = {name: real["configs"][name] for name in ("cpu", "cpu_ddp")}
    facts = machine(8, configs=configs)
    assert [name for name, *_ in doctor.choices(facts)] == ["cpu", "cpu_ddp"]
    assert "multi_node" not in doctor.report(facts, [])
    page = doctor.report(machine(8, configs={}), [])
    assert "accelerate launch" not in page


def test_in_a_folder_with_nothing_of_ours(tmp_path):
    """No requirements.txt, no configs, no scripts; torchvision and datasets are not needed."""
    package = tmp_path / "my_utils"
    shutil.copytree(ROOT / "utils" / "doctor", package / "doctor")
    for name in ("__init__", "console"):
        shutil.copy(ROOT / "utils" / f"{name}.py", package)
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "sys.modules['torchvision'] = None\n"
        "version = metadata.version\n"
        "def without(name):\n"
        "    if name in ('torchvision', 'datasets'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = without\n"
        "from my_utils import doctor\n"
        "sys.argv = ['doctor']\n"
        "sys.exit(doctor.main())\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    for name in list(environment):
        setting = f"{name}={environment[name]}"
        if any(re.fullmatch(pattern, setting) for pattern, *_ in doctor.VARIABLES):
            del environment[name]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("  error")]
    assert len(errors) == 1
    assert "accelerate_configs has no .yaml file" in errors[0]
    assert "torchvision" not in done.stdout


def test_a_missing_torch_is_a_problem_without_a_requirements_file(machine, real):
    versions = {**real["versions"], "torch": None}
    facts = machine(requirements=[], versions=versions, broken={"torch": "ModuleNotFoundError"})
    assert sentences(facts, True) == ["torch is not installed: pip install torch"]


@pytest.mark.parametrize(
    ("flags", "has_bf16", "words"),
    [
        ("fma avx512f avx512_bf16 avx512_fp16", True, "8 cores, bf16: twice as fast"),
        ("fma amx_bf16 amx_tile", True, "8 cores, bf16: twice as fast"),
        ("asimddp i8mm bf16 dgh", True, "8 cores, bf16: twice as fast"),
        ("fma avx512f avx512_fp16", False, "8 cores, bf16: slower than float32"),
        (None, None, "8 cores\n"),
    ],
)
def test_whether_bf16_pays_on_this_cpu(machine, tmp_path, flags, has_bf16, words):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    found = doctor.has_bf16(tmp_path / "cpuinfo")
    assert found is has_bf16
    assert words in doctor.report(machine(cores=8, cpu_has_bf16=found), [])
