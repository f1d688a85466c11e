"""In a step no process waits for its GPU: otherwise the GPU idles while Python prepares the next kernels.

On the GPUs of lying_gpu.py, and on real ones: there, PyTorch raises an error at the first wait.
"""

import functools
import shlex
from collections import Counter

import lying_gpu
import pytest
import small_resnets
import torch
import torch.distributed as dist
from lying_gpu import COPY, KERNEL, SYNC

from scripts import mnist_mlp

STEPS = 3  # of each run, after the warm-up
ONE_PROCESS = [
    "mnist_mlp --batch_size 8",
    "mnist_mlp --bf16 --batch_size 8 --gradient_accumulation_steps 2",
    "mnist_mlp --batch_size 8 --virtual_processes 4",
    "gradient_accumulation --batch_size 8",
    "gradient_accumulation --batch_size 8 --variable_length --gradient_accumulation_steps 2",
    "transformer --layers 2 --dim 32",
    "transformer --bf16 --separate_documents --layers 2 --dim 32 --gradient_accumulation_steps 2",
    "resnet50 --batch_size 8 --mixup 0.2 --cutmix 1.0 --ema_decay 0.9",
    "model_split --batch_size 8",
]
# By script: the runs of one launch.
TWO_PROCESSES = {
    "mnist_mlp": [
        "--bf16 --batch_size 8 --gradient_accumulation_steps 2",
        "--batch_size 8 --virtual_processes 4",
        "--batch_size 9 --virtual_processes 3",  # of which one process has two
    ],
    "gradient_accumulation": ["--batch_size 8 --variable_length --gradient_accumulation_steps 2"],
    "transformer": ["--layers 2 --dim 32 --checkpoint_activations"],
    "resnet50": ["--batch_size 8 --ema_decay 0.9 --gradient_accumulation_steps 2"],
    "model_split": [f"--batch_size 8 --schedule {schedule}" for schedule in ("naive", "gpipe", "1f1b")],
}
SMALL = {
    "transformer": "--vocabulary 257 --num_tokens 3",
    "resnet50": "--image_size 16 --num_workers 0",
    "model_split": "--num_microbatches 2 --max_test_samples 8",
}


@pytest.fixture(params=["lying", pytest.param("real", marks=pytest.mark.gpu)])
def gpus(request):
    return request.param


@pytest.fixture
def short(tiny_mnist):
    """Returns a function that gives the words of a short run."""

    def words(run: str, output_dir) -> list[str]:
        script = run.split()[0]
        dataset = lying_gpu.ROOT / "accelerate_configs" if script == "transformer" else tiny_mnist
        flags = ["--dataset", dataset, "--output_dir", output_dir, "--max_steps", lying_gpu.WARM_UP + STEPS]
        return [*run.split(), *SMALL.get(script, "").split(), *map(str, flags)]

    return words


SLOW = ("resnet50", "model_split", "transformer --bf16")


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.slow] * run.startswith(SLOW)) for run in ONE_PROCESS]
)
def test_no_step_waits_on_one_process(gpus, short, tmp_path, monkeypatch, run):
    small_resnets.use_quick(monkeypatch.setattr)
    lying = functools.partial(lying_gpu.lying_gpus, 2 if "model_split" in run else 1)
    events = lying_gpu.count(short(run, tmp_path / "run"), lying if gpus == "lying" else lying_gpu.errors_on_gpu)
    assert events.waits_in_steps() == []
    assert any(event.phase == "step" and event.kind == KERNEL for event in events) == (gpus == "lying")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "script"),
    [
        ("lying", "mnist_mlp"),
        ("lying", "transformer"),
        *(pytest.param("real", script, marks=pytest.mark.gpu) for script in TWO_PROCESSES),
    ],
    indirect=["gpus"],
)
def test_no_step_waits_on_two_processes(gpus, launcher, short, script):
    if gpus == "real" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    runs = [shlex.join(short(f"{script} {flags}", number)) for number, flags in enumerate(TWO_PROCESSES[script])]
    launcher("ddp", gpus, *runs, script=lying_gpu.FILE, launch_flags=["--num_processes", 2], timeout=400)


# In each of these, the host waits for the GPU. One line each: a wait is reported with its line.
WAITING = {
    SYNC: [
        lambda logits: logits.sum().item(),
        lambda logits: 1 if logits.sum() > 0 else 0,
        lambda logits: logits[logits > 0],
        lambda logits: logits.nonzero(),
        lambda logits: f"{logits.sum()}",
        lambda logits: logits.detach().cpu().numpy(),
        lambda logits: logits.tolist(),
        lambda logits: torch.empty(logits.shape).copy_(logits.detach()),
        lambda logits: logits.register_hook(lambda gradient: gradient.norm().item() and None),
        lambda logits: torch.cuda.synchronize(),
    ],
    COPY: [
        lambda logits: logits + torch.tensor([0.5] * 10, device=logits.device),
        lambda logits: logits + torch.ones(10).to(logits.device),
        lambda logits: logits[torch.arange(2)],
    ],
}
REFUSED = [
    (lambda logits: logits + torch.ones(10), "add of tensors"),
    (lambda logits: dist.all_reduce(torch.ones(1)), "allreduce_"),
]


def line_of(fault) -> str:
    return f"tests/distributed/test_no_synchronisation.py:{fault.__code__.co_firstlineno}"


@pytest.fixture
def _alone():
    """A process group of this process alone, for collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def train_with(monkeypatch, short, tmp_path):
    """Returns a function that trains mnist_mlp.py with faults in its steps, and gives the Events."""
    forward = mnist_mlp.MLP.forward

    def train(faults, gpus):
        def with_faults(model, images):
            logits = forward(model, images)
            for fault in faults if model.training else ():
                fault(logits)
            return logits

        monkeypatch.setattr(mnist_mlp.MLP, "forward", with_faults)
        return lying_gpu.count(short("mnist_mlp --batch_size 8", tmp_path / "run"), gpus)

    return train


def test_planted_waits_are_found_with_their_lines(train_with):
    events = train_with([fault for faults in WAITING.values() for fault in faults], lying_gpu.lying_gpus)
    found = Counter((event.kind, event.line) for event in events.waits_in_steps())
    assert found == {(kind, line_of(fault)): STEPS for kind, faults in WAITING.items() for fault in faults}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("fault", "error"), REFUSED)
def test_what_a_gpu_refuses_is_an_error_at_its_line(train_with, fault, error):
    with pytest.raises(RuntimeError, match=error) as caught:
        train_with([fault], lying_gpu.lying_gpus)
    lines = [f"{entry.path}:{entry.lineno + 1}" for entry in caught.traceback]
    assert str(lying_gpu.ROOT / line_of(fault)) in lines


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [*WAITING[SYNC][:-1], *WAITING[COPY]], ids=line_of)  # synchronize() raises no error
def test_a_planted_wait_is_an_error_on_a_gpu(train_with, fault):
    with pytest.raises(RuntimeError, match="synchronizing"):
        train_with([fault], lying_gpu.errors_on_gpu)
