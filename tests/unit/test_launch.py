"""make_accelerator: the flags it reads, trackers, the time-out, and what must be done before NCCL starts."""

import copy
import math
import os
import sys
from types import SimpleNamespace

import accelerate.optimizer
import accelerate.scheduler
import pytest
import torch
from torch import nn

from utils import banner, launch
from utils.accelerator import TrainingAccelerator
from utils.launch import make_accelerator
from utils.launched import share_of_cores
from utils.parallel.virtual_processes import sum_gradients_by_tree


def run_flags(**flags):
    args = {"batch_size": 8, "gradient_accumulation_steps": 1, "seed": 0, "output_dir": "x"}
    return SimpleNamespace(**{**args, **flags})


def test_steps_and_zero_grad_search_for_no_package_and_inspect_no_signature(monkeypatch):
    """As Accelerate's do: 8 % and 4 % of a step of mnist_mlp.py with batches of 64."""
    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", lambda: pytest.fail("searched the disk"))
    monkeypatch.setattr(accelerate.optimizer, "inspect", None)

    class OldOptimizer(torch.optim.SGD):
        def zero_grad(self):  # without set_to_none
            super().zero_grad()

    accelerator = make_accelerator(run_flags(gradient_accumulation_steps=2), cpu_threads=1)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(OldOptimizer([parameter], 0.1))
    found = []
    for _ in range(4):
        with accelerator.accumulate(parameter):
            accelerator.backward(parameter.sum())
            optimizer.step()
            optimizer.zero_grad()
        found.append((parameter[0].item(), parameter.grad is None))
    assert found == [(1.0, False), (pytest.approx(0.9), True), (pytest.approx(0.9), False), (pytest.approx(0.8), True)]


def test_flags_that_a_parser_lacks_have_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["own.py"])
    args = SimpleNamespace(lr=0.1)
    accelerator = make_accelerator(args)
    assert accelerator.gradient_accumulation_steps == 1
    assert args.output_dir.startswith("runs/own-")
    assert torch.initial_seed() == 0
    assert not hasattr(args, "resume")


def test_more_processes_than_gpus_stop_the_run_before_nccl_starts(monkeypatch, stops):
    """Accelerate itself takes the local rank modulo the number of GPUs, and NCCL refuses with `invalid usage`."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "TrainingAccelerator", None)  # it stops before
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "4 processes were started on a machine with 2 visible GPUs" in stops(make_accelerator, run_flags())
    for name, value, gpus in (
        ("LOCAL_WORLD_SIZE", "2", 2),
        ("LOCAL_WORLD_SIZE", "4", 0),
        ("CUDA_VISIBLE_DEVICES", "-1,-1", 2),
    ):
        monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        launch.launched.check_gpus()


@pytest.mark.parametrize("flags", [{}, {"deterministic": True}, {"virtual_processes": 4}])
def test_deterministic_algorithms_are_set_before_nccl_and_cublas_start(monkeypatch, flags):
    """NCCL leaves NVLS out only if they are set when the process group is made: inside of Accelerator()."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    found = []

    def start(**options):
        found.append(torch.are_deterministic_algorithms_enabled())
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8")
        found.append(not torch.backends.cudnn.benchmark)
        found.append(not torch.utils.deterministic.fill_uninitialized_memory)
        raise NotImplementedError

    monkeypatch.setattr(launch, "TrainingAccelerator", start)
    torch.use_deterministic_algorithms(False)
    try:
        with pytest.raises(NotImplementedError):
            make_accelerator(run_flags(**flags))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [bool(flags)] * 4


def test_ddp_and_the_timeout_are_as_the_flags_say():
    accelerator = make_accelerator(run_flags(), find_unused_parameters=True)
    assert accelerator.ddp_handler.gradient_as_bucket_view
    assert accelerator.ddp_handler.find_unused_parameters
    timeout = accelerator.init_handler.to_kwargs()["timeout"]
    assert timeout.total_seconds() == pytest.approx(600, abs=0.1)  # Accelerate drops 600.0, its own default
    timeout = make_accelerator(run_flags(timeout_s=7)).init_handler.to_kwargs()["timeout"]
    assert timeout.total_seconds() == pytest.approx(7, abs=0.1)


def test_a_schedule_counts_steps_and_neither_micro_batches_nor_processes(monkeypatch):
    accelerator = make_accelerator(run_flags(gradient_accumulation_steps=4), cpu_threads=1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counted = scheduler.scheduler._step_count
    monkeypatch.setattr(accelerate.scheduler, "AcceleratorState", lambda: SimpleNamespace(num_processes=3))
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.scheduler.last_epoch == 2
    assert scheduler.scheduler._step_count == counted + 2


def test_machines_with_different_code_do_not_train_together(monkeypatch, tmp_path):
    """`same_on_all` compares what it is given; here a change in the script or in utils must change that."""
    script, package = tmp_path / "train.py", tmp_path / "utils"
    (package / "data").mkdir(parents=True)
    monkeypatch.setattr(launch.sys, "argv", [str(script)])
    monkeypatch.setattr(banner, "__file__", str(package / "banner.py"))
    compared = []
    monkeypatch.setattr(launch, "same_on_all", compared.append)
    for path in (script, package / "loader.py", package / "banner.py", package / "data" / "text.py"):
        for text in ("a = 1", "a = 2"):
            path.write_text(text)
            make_accelerator(run_flags())
    make_accelerator(run_flags())
    *digests, again = ({name: d for name, d in facts.items() if name.startswith("SHA-256 of ")} for facts in compared)
    assert len({*map(str, digests)}) == len(digests) == 8
    assert again == digests[-1]
    files = ("train.py", "utils/banner.py", "utils/data/text.py", "utils/loader.py")
    assert list(again) == [f"SHA-256 of {name}" for name in files]


def test_a_tracker_that_is_not_there_stops_the_run(monkeypatch, stops):
    """Accelerate leaves one out that is not installed, and says so at log level debug only."""
    monkeypatch.setattr(launch, "get_available_trackers", lambda: [])
    assert "--log_with wandb is not" in stops(make_accelerator, run_flags(log_with="wandb"))


@pytest.mark.parametrize(
    ("flags", "environment", "sentence"),
    [
        ({"gradient_accumulation_steps": 2, "virtual_processes": 4}, {}, "a batch into 4 micro-batches"),
        ({"resume": True, "output_dir": None}, {}, "--resume needs the --output_dir"),  # else it begins anew
        ({"output_dir": None}, {"TORCHELASTIC_MAX_RESTARTS": "3"}, "--max_restarts needs an --output_dir"),
        (
            {},
            {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "--max_restarts needs --rdzv_backend c10d",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(monkeypatch, stops, flags, environment, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sentence in stops(make_accelerator, run_flags(**flags))


def test_virtual_processes_set_the_threads_and_the_micro_batches():
    accelerator = make_accelerator(run_flags(virtual_processes=4, batch_size=8))
    assert torch.get_num_threads() == 1
    assert accelerator.gradient_accumulation_steps == 4
    make_accelerator(run_flags(virtual_processes=4, batch_size=8), cpu_threads=2)
    assert torch.get_num_threads() == 2


def test_virtual_processes_add_gradients_undivided():
    accelerator = make_accelerator(run_flags(virtual_processes=2), cpu_threads=1)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    sum_gradients_by_tree(accelerator, [model])
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[2, 2]]


def test_a_gradient_scaler_scales_the_loss_and_skips_a_step():
    accelerator = make_accelerator(run_flags(gradient_accumulation_steps=2), cpu_threads=1)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], 0.1))
    for loss_factor, weight in ((1, 0.9), (math.inf, 0.9)):
        for gradient in (8 * loss_factor, 16 * loss_factor):
            with accelerator.accumulate(parameter):
                accelerator.backward(parameter.sum() * loss_factor)
                assert parameter.grad.item() == gradient
                optimizer.step()
        assert parameter.item() == pytest.approx(weight)
        optimizer.zero_grad()


@pytest.mark.parametrize("whole", [False, True])
def test_fsdp_reduces_the_gradients_of_each_micro_batch_or_once_per_step(monkeypatch, whole):
    flags = run_flags(gradient_accumulation_steps=3, batch_size=8, whole_gradients=whole)
    accelerator, reduces = make_accelerator(flags), []
    monkeypatch.setattr(type(accelerator), "is_fsdp2", True)
    model = SimpleNamespace(set_requires_gradient_sync=reduces.append)
    for _ in range(3):
        with accelerator.accumulate(model):
            reduces.append("backward")
    skipped = [False, "backward", True]
    assert reduces == ([*skipped, *skipped, "backward"] if whole else ["backward"] * 3)


CORES = [({}, None, 8), ({0, 1, 2}, "max 100000", 3), ({}, "250000 100000", 2), ({}, "5 10", 1)]


@pytest.mark.parametrize(("affinity", "quota", "expected"), CORES)
def test_the_processes_share_the_cores_of_the_affinity_and_of_the_quota(
    monkeypatch, tmp_path, affinity, quota, expected
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: affinity or set(range(16)), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert share_of_cores(tmp_path / "cpu.max") == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert share_of_cores(tmp_path / "cpu.max") == max(1, expected // 2)


@pytest.mark.parametrize(("asked", "expected"), [("5,2", 5), ("abc", 2), ("0", 1), ("-1", 2), (None, 2)])
def test_the_user_sets_the_threads_or_they_are_a_share_of_the_cores(monkeypatch, asked, expected):
    monkeypatch.setattr(launch.launched, "share_of_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", asked) if asked else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch.set_cpu_threads(None)
    assert torch.get_num_threads() == expected
    # A launcher sets the variable to a default, so its own environment counts.
    parent = SimpleNamespace(environ=lambda: {"OMP_NUM_THREADS": "6"})
    monkeypatch.setattr(launch.psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launch.set_cpu_threads(None)
    assert torch.get_num_threads() == 6
    monkeypatch.setattr(launch.psutil, "Process", lambda: SimpleNamespace(parent=lambda: None))  # in another container
    launch.set_cpu_threads(None)
    assert torch.get_num_threads() == 2
    launch.set_cpu_threads(1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("kind", ["all", "unfused", "partly fused"])
def test_gradients_that_are_not_finite_stay_out_of_weights_and_moments(capsys, kind):
    accelerator = TrainingAccelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    groups = [
        {"params": [model.weight], "fused": kind != "unfused"},
        {"params": [model.bias], "fused": "fused" not in kind},
    ]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, 0.1))

    def step(number, factor):
        accelerator.steps_done = number - 1
        accelerator.backward(model(torch.ones(3, 2)).sum() * factor)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step(1, 1.0)
    accelerator.check_norms()
    assert not accelerator.norms
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    if "fused" in kind:
        with pytest.raises(SystemExit):
            step(2, math.inf)
    else:
        step(2, math.nan)
        step(3, 1.0)  # nor is there another one before the run stops
        with pytest.raises(SystemExit):
            accelerator.check_norms()
    assert "the norm of the gradients is not finite in step 2: " in capsys.readouterr().err
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_what_the_accelerator_prints_goes_by_show_which_needs_no_reader(monkeypatch):
    """As in `python train.py | head -1`."""
    shown = []
    monkeypatch.setattr("utils.accelerator.show", shown.append)
    make_accelerator(run_flags(), cpu_threads=1).print("a", 1)
    assert shown == ["a 1"]
