"""Every config file is accepted by Accelerate, says how it is used, and starts what it says."""

import os
import re
import shlex
import subprocess
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.run
from accelerate.commands import launch
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from conftest import ROOT, free_port

from utils import topology

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
ON_CPUS = {"cpu", "cpu_ddp", "cpu_fsdp"}
NAMES = {*ON_CPUS, "single_gpu", "dp", "ddp", "multi_node", "fsdp"}


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
        assert defaults.num_processes in (1, 2, 8, "gpu")


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine with 4 GPUs, as far as the launcher asks CUDA: `four_gpus(*words)` is what `accelerate launch` does.

    As in CUDA, CUDA_VISIBLE_DEVICES has no effect once CUDA is initialized.
    """
    seen_when_initialized = []

    def count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (seen_when_initialized or [4 if visible is None else len(visible.split(","))])[0]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count)
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: seen_when_initialized.append(count()))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    monkeypatch.setattr(launch, "check_cuda_p2p_ib_support", lambda: True)

    def start(*words) -> tuple[int, bool]:
        """The number of processes, and whether the launcher has initialized CUDA."""
        started = []
        monkeypatch.setattr(torch.cuda, "_initialized", False)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
        monkeypatch.setattr(torch.cuda, "_queued_calls", [])
        monkeypatch.setattr(torch.cuda, "_lazy_seed_tracker", torch.cuda._LazySeedTracker())
        monkeypatch.setattr(
            torch.distributed.run, "elastic_launch", lambda config, **_: lambda *_: started.append(config)
        )
        seen_when_initialized.clear()
        words = [*words, "--main_process_port", str(free_port()), "script.py"]
        launch.launch_command(launch_command_parser().parse_args(words))
        return started[0].nproc_per_node, bool(seen_when_initialized)

    return start


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_some_of_the_gpus_and_bf16_start_the_processes_that_the_header_promises(four_gpus, tmp_path, name):
    """If the launcher asks CUDA about bf16, it sees all GPUs from then on, and keeps a context on the first."""
    config = ROOT / "accelerate_configs" / f"{name}.yaml"
    edited = tmp_path / "edited.yaml"
    edited.write_text(config.read_text().replace("gpu_ids: all", 'gpu_ids: "0,1"').replace('"no"', "bf16"))
    assert four_gpus("--config_file", str(config)) == (4, False)
    assert four_gpus("--config_file", str(edited)) == (2, False)
    assert four_gpus("--config_file", str(config), "--gpu_ids", "0,1") == (2, False)
    as_flags = ["--config_file", str(config), "--gpu_ids", "0,1", "--mixed_precision", "bf16"]
    assert four_gpus(*as_flags, "--num_processes", "2") == (2, True)
    assert four_gpus(*as_flags) == (4, True)  # once this is 2, headers and pages need not warn any more


def launched_environment(name: str) -> dict[str, str]:
    """The environment that the launcher gives to the processes of a config."""
    config = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    words = ["--config_file", config, "--main_process_port", str(free_port()), "script.py"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if options.multi_gpu or options.use_fsdp:
        return prepare_multi_gpu_env(options)
    return prepare_simple_launcher_cmd_env(options)[1]


@pytest.mark.parametrize(
    ("name", "visible"), [("single_gpu", "0"), ("dp", None), ("ddp", None), ("multi_node", None), ("fsdp", None)]
)
def test_a_process_sees_the_first_gpu_alone_or_all_of_them(name, visible, monkeypatch):
    """Several GPUs in one process would be DataParallel, and one GPU would make dp.yaml another single_gpu.yaml."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launched_environment(name).get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(("name", "large"), [("fsdp", 100_000), ("cpu_fsdp", 10_000)])
def test_fsdp_frees_gathered_parameters_and_shards_large_modules_each_on_its_own(monkeypatch, name, large):
    for variable, value in launched_environment(name).items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.min_num_params) == (2, True, large)
    assert plugin.cpu_ram_efficient_loading is False


@pytest.mark.parametrize("name", sorted(ON_CPUS))
def test_cpu_configs_want_the_cpu_also_beside_gpus(name, monkeypatch):
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    hidden = "" if config.gpu_ids is None else config.gpu_ids  # the launcher exports it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(topology, "requested_topology", lambda: (SimpleNamespace(cpu=False), config))
    assert topology.wants_cpu()


OWN_SCRIPT = """
import sys
from accelerate import Accelerator
accelerator = Accelerator(cpu=True) if "cpu" in sys.argv else Accelerator()
sys.stdout.write(f"{accelerator.num_processes}\\n")  # one write: two processes write at a time
"""


@pytest.mark.slow
def test_an_own_script_must_ask_for_the_cpu_as_the_header_says(launcher, monkeypatch):
    (launcher.folder / "own.py").write_text(OWN_SCRIPT)
    script = launcher.folder / "own"
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if not torch.accelerator.is_available():
        assert launcher("cpu_ddp", script=script).stdout.split() == ["1", "1"]
    assert launcher("cpu_ddp", "cpu", script=script).stdout.split() == ["2", "2"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launcher("cpu_ddp", script=script).stdout.split() == ["2", "2"]


@pytest.mark.parametrize("name", sorted(NAMES - ON_CPUS))
def test_gpu_configs_do_not_want_the_cpu(name, monkeypatch):
    config = load_config_from_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(topology, "requested_topology", lambda: (SimpleNamespace(cpu=False), config))
    assert not topology.wants_cpu()


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


@pytest.mark.parametrize("name", ["cpu", "single_gpu", "dp"])
def test_the_launcher_of_one_process_is_quiet(name, caplog):
    """No notice of what it chose, and no traceback of its own behind an error of the script."""
    words = ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), "script.py"]
    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert not caplog.records
    assert options.quiet
