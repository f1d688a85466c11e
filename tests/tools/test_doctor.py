"""Problems are made for real where this machine allows it; other machines are given as facts."""

import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT
from run_tool import run_tool

from tools import doctor


def machine(count=0, /, **changes) -> SimpleNamespace:
    """The facts of a machine without problems, except for the changes given."""
    facts = {
        "device": "cuda" if count else "cpu",
        "num_gpus": count,
        "complaints": [],
        "driver_gpus": count,
        "cores": 64,
        "shm_gib": 32,
        "untested": {},
        "environment": {"HOME": "/home/me", "FRANK": "1"},
        "default_config": None,
    }
    return SimpleNamespace(**facts | changes)


def test_the_facts_describe_this_machine():
    facts = doctor.gather()
    found = torch.accelerator.current_accelerator(check_available=True)
    assert facts.device == (found.type if found else "cpu")
    assert facts.num_gpus == torch.accelerator.device_count()
    assert 1 <= facts.cores <= os.cpu_count()


@pytest.mark.slow
def test_as_a_user_runs_it(tmp_path):
    """From another folder, with a default config and variables of another launcher."""
    config = tmp_path / "accelerate" / "default_config.yaml"
    config.parent.mkdir()
    config.write_text("distributed_type: MULTI_GPU\n")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "WORLD_SIZE": "4"}
    words = [sys.executable, ROOT / "tools" / "doctor"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    [warning] = [line for line in lines if str(config) in line]
    assert warning.startswith("warning: ")
    [error] = [line for line in lines if "WORLD_SIZE=4" in line]
    assert error.startswith("error: ")
    assert lines.index(error) < lines.index(warning)


def test_the_exit_code_is_1_only_if_a_run_would_fail(monkeypatch, capsys):
    for changes, code, words in (
        ({}, 0, "No problems found"),
        ({"cores": 1}, 0, "warning: 2 processes would share 1 core"),
        ({"driver_gpus": 8}, 1, "error: nvidia-smi lists 8 GPUs"),
    ):
        monkeypatch.setattr(doctor, "gather", lambda changes=changes: machine(**changes))
        found, printed = run_tool(doctor.main, capsys)
        assert found == code
        assert words in printed
        assert "Use cpu.yaml: " in printed


def test_a_package_that_cannot_be_imported_is_an_error_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    code, printed = run_tool(doctor.main, capsys)
    assert code == 2
    assert "torchvision cannot be imported (ModuleNotFoundError" in printed


@pytest.mark.parametrize(
    ("gpus", "device", "names"),
    [
        (0, "cpu", []),
        (1, "mps", ["single_gpu"]),
        (1, "cuda", ["single_gpu", "multi_node"]),
        (8, "cuda", ["ddp", "dp", "fsdp", "single_gpu", "multi_node", "hsdp"]),
    ],
)
def test_configs_that_fit_and_commands_that_the_launcher_accepts(gpus, device, names):
    choices = list(doctor.choices(machine(gpus, device=device)))
    assert [name for name, *_ in choices] == [*names, "cpu", "cpu_ddp", "cpu_fsdp", "cpu_hsdp"]
    for name, _, command in choices:
        words = shlex.split(command)
        assert words[:2] == ["accelerate", "launch"]
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        assert options.config_file == f"accelerate_configs/{name}.yaml"
        assert (ROOT / options.training_script).is_file()
        flags = options.training_script_args
        values = dict(zip(flags[::2], flags[1::2], strict=True))
        processes = {"multi_node": 2 * gpus, "hsdp": 2 * gpus, "cpu_hsdp": 4, "cpu_ddp": 2, "cpu_fsdp": 2}
        processes |= {"single_gpu": 1, "cpu": 1}
        assert int(values.get("--batch_size", 256)) % processes.get(name, gpus) == 0
        if name in ("multi_node", "hsdp"):
            assert (options.num_processes, options.num_machines) == (2 * gpus, 2)
        if name == "hsdp":
            sizes = (options.parallelism_config_dp_replicate_size, options.parallelism_config_dp_shard_size)
            assert sizes == (2, gpus)


HIDDEN = {"environment": {"CUDA_VISIBLE_DEVICES": ""}, "driver_gpus": 8}


@pytest.mark.parametrize(
    ("gpus", "changes", "fails", "sentence"),
    [
        (0, {"driver_gpus": 8}, True, "lists 8 GPUs, torch sees none: update the driver"),
        (0, HIDDEN, True, "lists 8 GPUs, torch sees none: unset CUDA_VISIBLE_DEVICES"),
        (0, {"untested": {"torch": (None, "~=2.15")}}, True, "torch is not installed: pip install"),
        (0, {"untested": {"torch": ("2.1", "~=2.15")}}, False, "torch 2.1 is not the tested ~=2.15: pip install"),
        (1, {"complaints": ["V100: no kernels"]}, True, "V100: no kernels"),
        (8, {"cores": 4}, False, "8 processes would share 4 cores"),
        (8, {"shm_gib": 0.0625}, True, "/dev/shm has 64 MiB free"),
        (0, {"default_config": "/home/me/x.yaml"}, False, "/home/me/x.yaml is silently used"),
        (0, {"environment": {"WORLD_SIZE": "16"}}, True, "WORLD_SIZE=16 in the environment"),
        (0, {"environment": {"WORLD_SIZE": "1"}}, False, "WORLD_SIZE=1 in the environment"),
        (0, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, False, "ACCELERATE_USE_FSDP=true"),
        (1, {"environment": {"ACCELERATE_USE_FSDP": "true"}}, True, "ACCELERATE_USE_FSDP=true"),
        (8, {"environment": {"NCCL_P2P_DISABLE": "1"}}, False, "NCCL_P2P_DISABLE=1"),
        (8, {"environment": {"CUDA_VISIBLE_DEVICES": "3"}}, False, "and single_gpu.yaml replaces it by 0: "),
    ],
)
def test_a_problem_in_the_facts(gpus, changes, fails, sentence):
    found = list(doctor.problems(machine(gpus, **changes)))
    assert any(bad == fails and sentence in text and ": " in text for bad, text in found)
    assert len(found) == (2 if changes is HIDDEN else 1)  # the variable itself is one more


def test_a_machine_without_problems_gets_no_warning():
    """No /dev/shm on an Apple machine; one core for one GPU."""
    assert not list(doctor.problems(machine(8)))
    assert not list(doctor.problems(machine(1, device="mps", shm_gib=None)))
    assert not list(doctor.problems(machine(1, cores=1)))


def test_requirements_that_are_not_met(tmp_path, monkeypatch):
    versions = {"torch": "2.15.1+cpu", "psutil": "7.2rc1", "ruff": "0.1"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    lines = ["# tested", "", "torch~=2.15.0", "no-such-package>=1  # gone", "ruff~=9.0", "psutil<8"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    found = doctor.untested_packages(tmp_path / "requirements.txt")
    assert found == {"no-such-package": (None, ">=1"), "ruff": ("0.1", "~=9.0")}
