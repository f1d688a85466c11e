"""Every config file is accepted by Accelerate, says how it is used, and starts what it says."""

import os
import re
import shlex
import subprocess
from types import SimpleNamespace

import pytest
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from conftest import CONFIGS, ROOT, free_port

from utils import launched

ON_CPUS = {"cpu", "cpu_ddp", "cpu_fsdp", "cpu_hsdp"}
NAMES = {*ON_CPUS, "single_gpu", "dp", "ddp", "multi_node", "fsdp", "hsdp"}


def test_all_topologies_are_there_and_explained():
    assert {path.stem for path in CONFIGS} >= NAMES
    text = (ROOT / "accelerate_configs" / "README.md").read_text()
    assert all(f"({path.name})" in text for path in CONFIGS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_accepted_and_its_header_command_parses(path):
    load_config_from_file(str(path))
    header = re.split(r"^[^#]", path.read_text(), maxsplit=1, flags=re.M)[0]
    commands = re.findall(r"accelerate launch (.+?[^\\])$", header.replace("\\\n#", ""), flags=re.M)
    assert commands
    for command in commands:
        options, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(shlex.split(command)))
        assert options.config_file == f"accelerate_configs/{path.name}"
        assert (ROOT / options.training_script).is_file()
        assert defaults.num_processes in (1, 2, 4, 8, "gpu")


def launched_environment(name: str) -> dict[str, str]:
    """The environment that the launcher gives to the processes of a config."""
    config = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    words = ["--config_file", config, "--main_process_port", str(free_port()), "script.py"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if options.multi_gpu or options.use_fsdp:
        return prepare_multi_gpu_env(options)
    return prepare_simple_launcher_cmd_env(options)[1]


@pytest.mark.parametrize(
    ("name", "visible"),
    [("single_gpu", "0"), *((name, None) for name in ("dp", "ddp", "multi_node", "fsdp", "hsdp"))],
)
def test_a_process_sees_the_first_gpu_alone_or_all_of_them(name, visible, monkeypatch):
    """Several GPUs in one process would be DataParallel, and one GPU would make dp.yaml another single_gpu.yaml."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launched_environment(name).get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("name", "large"), [("fsdp", 100_000), ("cpu_fsdp", 10_000), ("hsdp", 100_000), ("cpu_hsdp", 10_000)]
)
def test_fsdp_frees_gathered_parameters_and_shards_large_modules_each_on_its_own(monkeypatch, name, large):
    for variable, value in launched_environment(name).items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.min_num_params) == (2, True, large)
    assert plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize("name", sorted(NAMES))
def test_cpu_configs_alone_want_the_cpu_also_beside_gpus(name, monkeypatch):
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if name in ON_CPUS:  # the launcher exports it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if config.gpu_ids is None else config.gpu_ids)
    monkeypatch.setattr(launched, "requested_topology", lambda: (SimpleNamespace(cpu=False), config))
    assert launched.wants_cpu() == (name in ON_CPUS)


@pytest.mark.parametrize("name", ["one_node", "multi_node"])
def test_sbatch_files_are_bash_and_take_flags_that_exist(name):
    path = ROOT / "accelerate_configs" / "slurm" / f"{name}.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    command = re.search(r"accelerate launch (.+?)\$LAUNCH_FLAGS", text.replace("\\\n", ""), flags=re.S)[1]
    words = shlex.split(command)
    parser = launch_command_parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= known
    assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    options = re.findall(r"^#SBATCH (.+)$", text, flags=re.M)
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(options)


def test_several_machines_meet_at_the_address_of_the_first_one_with_either_backend():
    """With same_network, static would hand on another address; a job that is queued again goes on."""
    assert load_config_from_file(str(ROOT / "accelerate_configs" / "multi_node.yaml")).same_network is False


@pytest.mark.parametrize("name", ["one_node", "multi_node"])
def test_a_job_that_is_queued_again_resumes_the_run_of_its_number(name, tmp_path):
    """The sbatch file itself, with an srun that says what it would start."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "activate").touch()
    for program in ("srun", "scontrol"):
        (programs / program).write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
        (programs / program).chmod(0o755)
    environment = {"VENV": str(tmp_path), "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", ROOT / "accelerate_configs" / "slurm" / f"{name}.sbatch", "scripts/mine.py", "--lr", "1"]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed[-6:] == ["scripts/mine.py", "--output_dir", "runs/slurm-7", "--lr", "1", "--resume"]


@pytest.mark.parametrize("name", ["cpu", "single_gpu", "dp"])
def test_the_launcher_of_one_process_is_quiet(name, caplog):
    """No notice of what it chose, and no traceback of its own behind an error of the script."""
    words = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), "script.py"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert not caplog.records
    assert options.quiet
