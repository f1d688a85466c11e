"""Problems are made for real where this machine allows it; other machines are given as facts."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT

from tools import doctor

CONFIGS = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
H100 = doctor.Gpu("NVIDIA H100 80GB HBM3", 79.2, 78.6)


@pytest.fixture
def machine():
    """`machine(8, ...)`: the facts of a machine without problems, except for the changes given."""

    def machine(count=0, /, **changes):
        facts = {
            "device": "cuda" if count else "cpu",
            "gpus": [H100] * count,
            "p2p": True,
            "complaints": [],
            "driver_gpus": count,
            "cores": 64,
            "load": 1.0,
            "cpu_has_bf16": None,
            "memory_gib": 256,
            "free_memory_gib": 200,
            "folder": "/runs",
            "is_writable": True,
            "free_disk_gib": 500,
            "shm_gib": 32,
            "untested": {},
            "broken": {},
            "environment": {"HOME": "/home/me", "FRANK": "1"},
            "default_config": None,
        }
        return SimpleNamespace(**{**facts, **changes})

    return machine


def sentences(facts, fails) -> list[str]:
    return [sentence for bad, sentence in doctor.problems(facts) if bad == fails]


def test_what_is_gathered_is_what_is_there(tmp_path):
    facts = doctor.gather(tmp_path)
    found = torch.accelerator.current_accelerator(check_available=True)
    assert facts.device == (found.type if found else "cpu")
    assert len(facts.gpus) == torch.accelerator.device_count()
    assert 0 < facts.free_memory_gib < facts.memory_gib
    assert facts.free_disk_gib == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, rel=0.2)
    assert 1 <= facts.cores <= os.cpu_count()
    assert facts.broken == {}
    assert facts.is_writable
    assert not doctor.is_writable(Path("/proc"))  # for root too
    assert not list(tmp_path.iterdir())


def test_as_a_user_runs_it(tmp_path):
    """From another folder, with a default config and variables of another launcher."""
    config = tmp_path / "accelerate" / "default_config.yaml"
    config.parent.mkdir()
    config.write_text("distributed_type: MULTI_GPU\n")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "WORLD_SIZE": "4"}
    words = [sys.executable, ROOT / "tools" / "doctor", "--output_dir", tmp_path / "runs" / "new"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    [warning] = [line for line in lines if str(config) in line]
    assert warning.startswith("warning: ")
    [error] = [line for line in lines if "WORLD_SIZE=4" in line]
    assert error.startswith("error: ")
    assert lines.index(error) < lines.index(warning)
    assert f"free in {tmp_path}\n" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_the_exit_code_is_1_only_if_a_run_would_fail(machine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor"])
    for changes, code, words in (
        ({}, 0, "No problems found"),
        ({"free_disk_gib": 0.5}, 0, "warning: /runs has 0.50 GiB free"),
        ({"is_writable": False}, 1, "error: /runs is not writable"),
    ):
        monkeypatch.setattr(doctor, "gather", lambda folder, changes=changes: machine(**changes))
        assert doctor.main() == code
        assert words in capsys.readouterr().out


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
        (0, "cpu", ["cpu", "cpu_ddp", "cpu_fsdp"]),
        (1, "mps", ["single_gpu", "cpu", "cpu_ddp", "cpu_fsdp"]),
        (1, "cuda", ["single_gpu", "multi_node", "cpu", "cpu_ddp", "cpu_fsdp"]),
        (2, "cuda", ["ddp", "dp", "fsdp", "single_gpu", "multi_node", "cpu", "cpu_ddp", "cpu_fsdp"]),
    ],
)
def test_configs_that_fit(machine, capsys, gpus, device, names):
    facts = machine(gpus, device=device)
    assert [name for name, *_ in doctor.choices(facts)] == names
    assert set(names) <= CONFIGS
    doctor.report(facts, [])
    assert f"Use {names[0]}.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
def test_commands_are_accepted_by_the_launcher(machine, gpus):
    for name, _, command in doctor.choices(machine(gpus)):
        words = shlex.split(command)
        assert words[:2] == ["accelerate", "launch"]
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert options.config_file == f"accelerate_configs/{name}.yaml"
        assert (ROOT / options.training_script).is_file()
        flags = options.training_script_args
        values = dict(zip(flags[::2], flags[1::2], strict=True))
        processes = {"multi_node": 2 * gpus, "cpu_ddp": 2, "cpu_fsdp": 2, "single_gpu": 1, "cpu": 1}
        assert int(values.get("--batch_size", 256)) % processes.get(name, gpus) == 0
        if name == "multi_node":
            assert (options.num_processes, options.num_machines) == (2 * gpus, 2)


HIDDEN = {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "driver_gpus": 8}
BROKEN = {"torch": "OSError: libcudart.so.13", "accelerate": "OSError: libcudart.so.13"}


@pytest.mark.parametrize(
    ("gpus", "changes", "fails", "sentence"),
    [
        (0, {"driver_gpus": 8}, True, "lists 8 GPUs, torch sees none: update the driver"),
        (0, HIDDEN, True, "lists 8 GPUs, torch sees none: unset CUDA_VISIBLE_DEVICES"),
        (0, {"driver_gpus": 8, "broken": BROKEN}, True, "torch cannot be imported (OSError: libcudart.so.13)"),
        (0, {"broken": {"torchvision": "RuntimeError: no nms"}}, True, "torchvision cannot be imported (Runtime"),
        (0, {"untested": {"torch": (None, "~=2.15")}}, True, "torch is not installed: pip install"),
        (0, {"untested": {"torch": ("2.1", "~=2.15")}}, False, "torch 2.1 is not the tested ~=2.15: pip install"),
        (0, {"untested": {"ruff": (None, "~=0.17")}}, False, "ruff is not installed: pip install"),
        (1, {"complaints": ["V100: no kernels"]}, True, "V100: no kernels"),
        (1, {"gpus": [doctor.Gpu("A100", 40, 1.5)]}, True, "GPU 0 has only 1.5 of 40.0 GiB free"),
        (1, {"gpus": [doctor.Gpu("A100", 40, 15)]}, False, "GPU 0 has only 15.0 of 40.0 GiB free"),
        (8, {"cores": 4}, False, "8 processes would share 4 cores"),
        (0, {"cores": 1}, False, "2 processes would share 1 core:"),
        (8, {"shm_gib": 0.0625}, True, "/dev/shm has 64 MiB free"),
        (0, {"shm_gib": 0.0625}, False, "/dev/shm has 64 MiB free"),
        (0, {"free_disk_gib": 0.5}, False, "has 0.50 GiB free"),
        (0, {"is_writable": False, "free_disk_gib": 0}, True, "/runs is not writable: pass"),
        (0, {"default_config": "/home/me/x.yaml"}, False, "/home/me/x.yaml is silently used"),
        (0, {"environment": {"WORLD_SIZE": "16"}}, True, "WORLD_SIZE=16 in the environment"),
        (0, {"environment": {"WORLD_SIZE": "1"}}, False, "WORLD_SIZE=1 in the environment"),
        (0, {"environment": {"LOCAL_RANK": "0"}}, True, "LOCAL_RANK=0 in the environment"),
        (0, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, False, "ACCELERATE_USE_FSDP=true"),
        (1, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, True, "ACCELERATE_USE_FSDP=true"),
        (0, {"environment": {"ACCELERATE_MIXED_PRECISION": "fp16"}}, False, "PRECISION=fp16"),
        (8, {"environment": {"NCCL_P2P_DISABLE": "1"}}, False, "NCCL_P2P_DISABLE=1"),
        (8, {"environment": {"CUDA_VISIBLE_DEVICES": "3"}}, False, "and single_gpu.yaml replaces it by 0: "),
        (0, {"load": 65.0}, False, "OMP_WAIT_POLICY=PASSIVE"),
    ],
)
def test_a_problem_in_the_facts(machine, gpus, changes, fails, sentence):
    facts = machine(gpus, **changes)
    assert [found for found in sentences(facts, fails) if sentence in found and ": " in found]
    assert len(list(doctor.problems(facts))) == (2 if changes is HIDDEN else 1)  # the variable itself is one more


def test_what_is_no_problem(machine):
    """Little free memory on an Apple GPU; one core for one GPU; another build of a tested version."""
    assert not list(doctor.problems(machine(8)))
    assert not list(doctor.problems(machine(1, device="mps", gpus=[doctor.Gpu("Apple GPU", 16, 3)], shm_gib=None)))
    assert not list(doctor.problems(machine(1, cores=1)))


def test_requirements_that_are_not_met(tmp_path, monkeypatch):
    versions = {"torch": "2.15.1+cpu", "psutil": "7.2rc1", "ruff": "0.1"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    lines = ["# tested", "", "torch~=2.15.0", "no-such-package>=1  # gone", "ruff~=9.0", "psutil<8"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    found = doctor.untested_packages(tmp_path / "requirements.txt")
    assert found == {"no-such-package": (None, ">=1"), "ruff": ("0.1", "~=9.0")}


def test_what_torch_warns_of_is_a_problem(monkeypatch, tmp_path):
    """A GPU that this torch has no kernels for; too old a driver is one more of its warnings."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (7, 0)][device])
    monkeypatch.setattr(torch.cuda, "get_device_name", ["H100", "V100"].__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", torch.cuda._check_capability)
    (complaint,) = doctor.gather(tmp_path).complaints
    assert complaint.startswith("Found GPU1 V100 which is of compute capability (CC) 7.0")
    assert "pip install torch==" in complaint


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_gpus_as_torch_reports_them(monkeypatch, device):
    """Apple's GPU has no memory of its own and no `mem_get_info`: the machine's is shown."""
    memory = SimpleNamespace(available=6 * 2**30, total=16 * 2**30)

    def mem_get_info(index):
        if index == 1:
            raise torch.OutOfMemoryError("another process has it all")
        return 2**30, 2**35

    def properties(index):
        return SimpleNamespace(name=f"card {index}", total_memory=2**35)

    module = SimpleNamespace(get_device_properties=properties, mem_get_info=mem_get_info)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(device))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2 if device == "cuda" else 1)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.__getitem__)
    for peers in (True, False):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other, peers=peers: peers or one == 0)
        found = doctor.ask_torch(memory)
        cards = [("card 0", 32, 1), ("card 1", 32, 0)]
        assert found["gpus"] == {"cuda": cards, "mps": [("Apple GPU", 16, 6)]}[device]
        assert found["device"] == device
        assert found["p2p"] == (peers or device == "mps")


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [
        ("fma avx512f avx512_bf16", True),
        ("amx_bf16 amx_tile", True),
        ("asimddp bf16 dgh", True),
        ("avx512_fp16", False),
    ],
)
def test_whether_this_cpu_has_bf16(tmp_path, flags, has_bf16):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    assert doctor.has_bf16(tmp_path / "cpuinfo") is has_bf16
    assert doctor.has_bf16(tmp_path / "missing") is None
