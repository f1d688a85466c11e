"""In a step no process waits for its GPU: otherwise the GPU idles while Python prepares the next kernels.

On the GPUs of lying_gpu.py, and on real ones: there, PyTorch raises an error at the first wait.
"""

import functools
import inspect
import json
import shlex
from collections import Counter

import lying_gpu
import pytest
import torch
import torch.distributed as dist
from lying_gpu import COPY, CPU_COLLECTIVE, FAULTS, KERNEL, MIXED, RUNS, STEPS, SYNC, Events

from scripts import mnist_mlp

# By run, at most: kernels of a step besides those of autograd; waits outside of the steps, one per tensor that is moved
# or saved, per batch of data, per log line, test and checkpoint.
BUDGETS = [(17, 16), (44, 16), (65, 43), (33, 18), (108, 18), (127, 33), (292, 33), (264, 493), (484, 729)]
# By script: the runs of one launch.
TWO_PROCESSES = {
    "mnist_mlp": [
        ["--bf16", "--batch_size", 8, "--gradient_accumulation_steps", 2],
        ["--batch_size", 8, "--virtual_processes", 4],
        ["--batch_size", 9, "--virtual_processes", 3],  # of which one process has two
    ],
    "gradient_accumulation": [["--batch_size", 8, "--variable_length", "--gradient_accumulation_steps", 2]],
    "transformer": [["--layers", 2, "--dim", 32, "--checkpoint_activations"]],
    "resnet50": [["--batch_size", 8, "--ema_decay", 0.9, "--gradient_accumulation_steps", 2]],
    "model_split": [
        ["--batch_size", 8, "--schedule", schedule] for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    ],
}


@pytest.fixture(params=["lying", pytest.param("real", marks=pytest.mark.gpu)])
def gpus(request):
    return request.param


@pytest.fixture
def _small_models(monkeypatch):
    lying_gpu.make_small(monkeypatch.setattr)


@pytest.mark.usefixtures("_small_models")
@pytest.mark.parametrize(("run", "budget"), list(zip(RUNS, BUDGETS, strict=True)), ids=RUNS)
def test_no_step_waits_on_one_process(gpus, tiny_mnist, tmp_path, run, budget):
    script, *flags = run.split()
    flags = [*lying_gpu.with_data(script, flags, tiny_mnist), "--output_dir", tmp_path / "run"]
    lying = functools.partial(lying_gpu.lying_gpus, 2 if script == "model_split" else 1)
    events = lying_gpu.count(script, flags, lying if gpus == "lying" else lying_gpu.errors_on_gpu)
    assert events.of("step", *FAULTS) == []
    assert events.of("warm-up", MIXED, CPU_COLLECTIVE) == events.of("outside", MIXED, CPU_COLLECTIVE) == []
    if gpus == "lying":
        kernels, waits = budget
        assert 0 < events.total("step", KERNEL) / STEPS <= kernels
        assert 0 < events.total("outside", SYNC, COPY) <= waits


@pytest.mark.slow
@pytest.mark.parametrize("script", TWO_PROCESSES)
def test_no_step_waits_on_two_processes(gpus, launcher, tiny_mnist, script):
    if gpus == "real" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    runs = []
    for number, flags in enumerate(TWO_PROCESSES[script]):
        flags = lying_gpu.with_data(script, flags, tiny_mnist)
        runs.append(shlex.join(map(str, [script, *flags, "--output_dir", number])))
    launcher("ddp", gpus, *runs, script=lying_gpu.FILE, launch_flags=["--num_processes", 2], timeout=400)
    for number in range(len(runs)):
        for rank in range(2):
            rows = json.loads((launcher.folder / str(number) / f"events_{rank}.json").read_text())
            events = Events({tuple(key): count for *key, count in rows})
            assert events.of("step", *FAULTS) == [], runs[number]
            assert events.of("warm-up", MIXED, CPU_COLLECTIVE) == events.of("outside", MIXED, CPU_COLLECTIVE) == []
            assert (events.total("step", KERNEL) > 0) == (gpus == "lying")


def item(images, logits):
    return logits.sum().item()


def branch(images, logits):
    return 1 if logits.sum() > 0 else 0


def mask(images, logits):
    return logits[logits > 0]


def nonzero(images, logits):
    return logits.nonzero()


def printed(images, logits):
    return f"{logits.sum()}"


def to_numpy(images, logits):
    return logits.detach().cpu().numpy()


def to_list(images, logits):
    return logits.tolist()


def copied_out(images, logits):
    return torch.empty(logits.shape).copy_(logits.detach())


def synchronized(images, logits):
    return torch.cuda.synchronize()


def in_backward(images, logits):
    logits.register_hook(lambda gradient: gradient.norm().item() and None)


def constant(images, logits):
    return logits + torch.tensor([0.5] * 10, device=logits.device)


def moved_in(images, logits):
    return logits + torch.ones(10).to(logits.device)


def index_of_cpu(images, logits):
    return logits[torch.arange(2)]


def cpu_tensor(images, logits):
    return logits + torch.ones(10)


def cpu_collective(images, logits):
    dist.all_reduce(torch.ones(1))


KINDS = {
    SYNC: [item, branch, mask, nonzero, printed, to_numpy, to_list, copied_out, synchronized, in_backward],
    COPY: [constant, moved_in, index_of_cpu],
    MIXED: [cpu_tensor],
    CPU_COLLECTIVE: [cpu_collective],
}
PLANTED = [(kind, fault) for kind, faults in KINDS.items() for fault in faults]


def line_of(fault) -> str:
    lines, first = inspect.getsourcelines(fault)
    return f"tests/distributed/test_no_synchronisation.py:{first + len(lines) - 1}"


@pytest.fixture
def _alone():
    """A process group of this process alone, for collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def train_with(monkeypatch, tiny_mnist, tmp_path):
    """Returns a function that trains mnist_mlp.py with faults in its steps, and gives the Events."""
    forward = mnist_mlp.MLP.forward

    def train(faults, gpus):
        def with_faults(model, images):
            logits = forward(model, images)
            for fault in faults if model.training else ():
                fault(images, logits)
            return logits

        monkeypatch.setattr(mnist_mlp.MLP, "forward", with_faults)
        flags = lying_gpu.with_data("mnist_mlp", ["--batch_size", 8], tiny_mnist)
        return lying_gpu.count("mnist_mlp", [*flags, "--output_dir", tmp_path / "run"], gpus)

    return train


@pytest.mark.usefixtures("_alone")
def test_planted_faults_are_found_with_their_lines(train_with):
    events = train_with([fault for _, fault in PLANTED], lying_gpu.lying_gpus)
    found = Counter()
    for (phase, kind, _, line), count in events.items():
        if phase == "step" and kind in FAULTS:
            found[kind, line] += count
    assert found == {(kind, line_of(fault)): STEPS for kind, fault in PLANTED}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [fault.__name__ for fault in (*KINDS[SYNC], *KINDS[COPY]) if fault != synchronized])
def test_a_planted_fault_is_an_error_on_a_gpu(train_with, name):
    with pytest.raises(RuntimeError, match="synchronizing"):
        train_with([globals()[name]], lying_gpu.errors_on_gpu)
