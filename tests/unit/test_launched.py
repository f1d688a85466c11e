"""What runs is what the config file asked for, is the same on all processes, and is announced."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from fakes import fake_accelerator

from utils import agree, banner, launched
from utils.loader import GlobalLoader


def cluster(**keys):
    keys = {"distributed_type": "NO", "num_processes": 1, "use_cpu": False, "debug": False} | keys
    return ClusterConfig(compute_environment="LOCAL_MACHINE", mixed_precision="no", **keys)


@pytest.fixture
def asked(monkeypatch):
    def ask(config, **options):
        options = SimpleNamespace(cpu=False, num_processes=None, config_file="some.yaml", **options)
        monkeypatch.setattr(launched, "requested_topology", lambda: (options, config))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return ask


@pytest.mark.parametrize(
    ("sizes", "machine", "sentence"),
    [
        ({"DP_REPLICATE": 2, "DP_SHARD": 2}, 4, ""),
        ({"DP_REPLICATE": 2, "DP_SHARD": 2}, 1, ""),  # two machines for each replica
        ({"DP_SHARD": 4}, 2, ""),
        ({"DP_REPLICATE": 4}, 4, "4 replicas of 1 shard: use ddp.yaml"),
        ({"DP_SHARD": 2, "TP": 2}, 4, "tp_size 2 shares samples between processes"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_refused(monkeypatch, stops, sizes, machine, sentence):
    variables = {f"PARALLELISM_CONFIG_{name}_SIZE": size for name, size in sizes.items()}
    variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": machine}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert launched.check_sharding() is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    if sentence:
        assert sentence in stops(launched.check_sharding)
    else:
        assert launched.check_sharding() == sizes["DP_SHARD"]


@pytest.mark.parametrize(
    ("config", "environment", "runs", "sentence"),
    [
        ({}, {"WORLD_SIZE": "2"}, {}, "the launcher started 2 processes, but they did not form a"),
        (
            {"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True},
            {},
            {},
            "asks for 4 processes with distributed_type MULTI_CPU, but the run has 1 process:",
        ),
        ({}, {}, {}, "asks for a GPU, but none is visible"),
        ({"num_processes": 8}, {"WORLD_SIZE": "4"}, {"processes": 4, "device": "cuda"}, "asks for 8 processes"),
        # Accelerate would train in float32 and not say so.
        ({"use_cpu": True}, {}, {"precision": "fp16"}, "precision fp16 needs a GPU: "),
    ],
)
def test_another_topology_than_asked_for_stops_the_run(asked, monkeypatch, stops, config, environment, runs, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked(cluster(**config))
    assert sentence in stops(launched.check_topology, fake_accelerator(**runs))


def test_the_topology_that_was_asked_for_runs(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked(cluster(use_cpu=True))
    launched.check_topology(fake_accelerator(precision="bf16"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    asked(cluster(distributed_type="FSDP", num_processes=4))
    launched.check_topology(fake_accelerator(4, device="cuda", kind="FSDP", precision="fp16"))
    asked(cluster(distributed_type="MULTI_GPU", num_processes="gpu"))
    launched.check_topology(fake_accelerator(4, device="cuda", kind="MULTI_GPU"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1,-1")
    asked(cluster(distributed_type="FSDP", num_processes=4))
    launched.check_topology(fake_accelerator(4, kind="FSDP"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    asked(cluster(distributed_type="FSDP"))
    launched.check_topology(fake_accelerator())  # one process has nothing to shard


@pytest.mark.parametrize(
    ("promised", "started", "is_right"),
    [
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "gpu"}, {"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"SKYPILOT_NUM_NODES": "2"}, {}, False),  # started by plain python
        ({"SKYPILOT_NUM_NODES": "2"}, {"GROUP_WORLD_SIZE": "2"}, True),
    ],
)
def test_machines_that_an_operator_promised_are_there(monkeypatch, capsys, promised, started, is_right):
    for name, value in {**promised, **started}.items():
        monkeypatch.setenv(name, value)
    with contextlib.nullcontext() if is_right else pytest.raises(SystemExit):
        launched.check_topology(fake_accelerator())
    assert ("start with torchrun" in capsys.readouterr().err) is not is_right


@pytest.mark.parametrize(("tasks", "processes", "is_warned"), [("4", 1, True), ("4", 4, False), ("1", 1, False)])
def test_tasks_of_srun_that_train_alone_are_warned(monkeypatch, capsys, tasks, processes, is_warned):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    launched.check_topology(fake_accelerator(processes))
    assert ("warning: srun started 4 tasks, and each trains" in capsys.readouterr().out) is is_warned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n", "asks for 2 processes"),
        ("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n", "FSDP needs `fsdp_version: 2`"),
    ],
)
def test_configs_that_accelerate_takes_for_something_else(launcher, name, text):
    config = launcher.folder / "trap.yaml"
    config.write_text(name)
    done = launcher(str(config), "--output_dir", "run", check=False)
    assert done.returncode != 0
    assert text in done.stderr
    assert not (launcher.folder / "run").exists()


@pytest.mark.slow
def test_use_cpu_with_several_processes_is_one_job(launcher, small_mnist):
    """Accelerate alone would train two separate models here. The file is as `accelerate config` writes it."""
    config = launcher.folder / "two.yaml"
    keys = {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "use_cpu": True,
        "compute_environment": "LOCAL_MACHINE",
    }
    keys |= {"debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0, "num_machines": 1}
    keys |= {"main_training_function": "main", "mixed_precision": "no", "rdzv_backend": "static", "same_network": True}
    keys |= {"tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
    config.write_text(yaml.safe_dump(keys))
    done = launcher(str(config), "--dataset", small_mnist, "--max_steps", 2, "--output_dir", "run")
    assert "2 processes on 1 machine (MULTI_CPU over gloo)" in done.stdout
    assert done.stdout.count("done: ") == 1


def test_a_gpu_config_without_a_gpu_names_the_way_out(launcher):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU here")
    done = launcher("single_gpu", check=False)
    assert "asks for a GPU, but none is visible: use cpu.yaml, cpu_ddp.yaml or cpu_fsdp.yaml" in done.stderr


def test_what_differs_between_processes_is_named(monkeypatch, stops):
    facts, shared = {"lr": 0.1, "output_dir": "a", "seed": 0}, {"lr": 0.1, "seed": 0}
    others = [("alpha", shared), ("beta", shared)]
    monkeypatch.setattr(agree, "gather_object", lambda mine: [*others, *mine])
    assert agree.same_on_all(facts) == facts
    assert "has lr 0.2, not 0.1 as rank 0 on alpha" in stops(agree.same_on_all, facts | {"lr": 0.2})
    for values in ({"lr": 0.2, "seed": 0}, {"lr": 0.1}, {"lr": 0.1, "seed": 0, "momentum": 0.9}):
        others[1] = "beta", values  # one that is different, missing, or one more
        assert stops(agree.same_on_all, facts).startswith("error: rank 1 on beta has ")


def test_the_banner_says_what_will_run(monkeypatch, capsys):
    process = {"device": "cpu", "device_name": None, "cpu_threads": 1}
    runs = {
        "config_file": "some.yaml",
        "distributed_type": "MULTI_CPU",
        "backend": "gloo",
        "num_processes": 4,
        "data_parallel_gpus": 1,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 2,
        "virtual_processes": 0,
        "processes": [process | {"host": host} for host in ("alpha", "alpha", "beta", "beta")],
    }
    monkeypatch.setattr(banner, "describe_topology", lambda accelerator: runs)
    data = {"dataset": "a\x1b[31m", "train samples": 1003}
    accelerator = fake_accelerator(4, accumulation=2)
    banner.print_banner(accelerator, GlobalLoader(range(640), 64, accelerator, seed=0), 25, data, "runs/a")
    said = capsys.readouterr().out
    assert "4 processes on 2 machines (MULTI_CPU over gloo), each cpu with 1 thread, precision bf16\n" in said
    assert "some.yaml\n" in said
    assert "64 = 8 per process x 4 processes x 2 accumulation steps\n" in said
    assert "25 steps = 2.5 epochs of 10\n" in said
    assert "dataset a\\x1b[31m, train samples 1003\n" in said  # and not in red
    assert "runs/a\n" in said
