"""What test_topologies.py cannot show: faults over NCCL, memory, fp16, links, the launcher; `python -m pytest -m gpu`.

    python -m pytest tests/distributed/test_on_gpus.py -m gpu --stand_ins -n 0    # tries out this file without a GPU

This file is also the script of the runs with a fault: `test_on_gpus.py FAULT SCRIPT FLAGS`.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import run_many
import run_reader
import torch
from accelerate import Accelerator
from conftest import ROOT, free_port
from same_numbers import TOLERANCE, differences
from torch import nn
from torch.nn import functional as F

from utils.checkpoint import Checkpoints
from utils.checkpoint.reading import read_checkpoint
from utils.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
FLAGS = ["--num_epochs", 2, "--batch_size", 50, "--lr", 1e-3, "--hidden", 160, "--log_every", 1]
FLAGS += ["--checkpoint_every", 10, "--keep_checkpoints", 0]
STEPS, CUT = 42, 30
STAND_INS = {"single_gpu": "cpu", "dp": "cpu", "ddp": "cpu_ddp"}
TIMEOUT_S = 20  # of a run with a fault, which has this long again, and 40 s to start, to end
AT_STEP = 20  # the last rank has its fault there
SCALE = 2.0**32  # fp16: with this one, the first steps overflow
NEVER = 10**6  # steps
TEXT = ["--vocabulary", 290, "--context", 64, "--dim", 64, "--layers", 2, "--heads", 2]
MASKS = {}  # by device, how many numbers nn.Dropout left out, call by call


def loop(run):
    while True:
        time.sleep(0)


def kill(number, run):
    os.kill(os.getpid(), number)


def one_collective_more(run):
    torch.distributed.all_reduce(torch.zeros(3, device=run.accelerator.device))


def run_out_of_memory(run):
    torch.empty(2**50, device=run.accelerator.device)


def dropout_that_counts(layer, x):
    mask = F.dropout(torch.ones_like(x), layer.p, layer.training)
    if layer.training:
        MASKS.setdefault(str(x.device), []).append(int((mask == 0).sum()))
    return x * mask


FAULTS = {
    "kill -9": functools.partial(kill, signal.SIGKILL),
    "SIGSTOP": functools.partial(kill, signal.SIGSTOP),
    "endless loop": loop,
    "one collective more": one_collective_more,
    "out of memory": run_out_of_memory,
}
# What the output has, and the processes that it takes. A rank that waits says which one it waits for.
WAITS, SAVED = r"(warning|error): rank \d+ on .*(has waited|lost|wait)", r"stopped by a signal; step \d+ is saved"
ENDS = {
    "kill -9": (r"error: rank \d+ on .*lost |exitcode +: -9", 1),
    "SIGSTOP": (WAITS, 2),
    "endless loop": (WAITS, 2),
    "one collective more": (r"error: rank \d+ on ", 2),
    "out of memory": (r"error: rank \d+ on .* ran out of memory at ", 1),
    "SIGTERM": (SAVED, 1),
    "Ctrl-C": (SAVED, 1),
}


def main():
    fault, script = sys.argv[1:3]
    del sys.argv[1:3]
    with pytest.MonkeyPatch.context() as patch:
        if fault == "overflow":
            patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=SCALE))
        elif fault == "counted masks":
            patch.setattr(nn.Dropout, "forward", dropout_that_counts)
        else:
            log_train = Run.log_train

            def log_train_or_fail(self, *args, **options):
                is_last = self.accelerator.process_index == self.accelerator.num_processes - 1
                if self.step == AT_STEP and is_last and fault in FAULTS:
                    FAULTS[fault](self)
                log_train(self, *args, **options)

            patch.setattr(Run, "log_train", log_train_or_fail)
        run_many.load(script, run_many.path_of(script)).main()
    if MASKS:
        Path(sys.argv[sys.argv.index("--output_dir") + 1], "masks.json").write_text(json.dumps(MASKS))


@pytest.fixture
def gpus(request) -> int:
    return 2 if request.config.option.stand_ins else torch.cuda.device_count()


@pytest.fixture
def launcher(launcher, request, monkeypatch):
    """As in conftest.py; with --stand_ins the configs of the CPU take the places of those of GPUs."""
    words, stand_ins = launcher.words, request.config.option.stand_ins

    def words_here(config, *flags, launch_flags=(), **options):
        hidden = ["--gpu_ids=-1,-1"] if stand_ins and config == "multi_node" else []
        config = STAND_INS.get(config, config) if stand_ins else config
        return words(config, *flags, launch_flags=[*launch_flags, *hidden], **options)

    monkeypatch.setattr(launcher, "words", words_here)
    return launcher


def needs(gpus: int, available: int) -> None:
    if available < gpus:
        pytest.skip(f"needs {gpus} GPUs, and this machine has {available}")


def test_a_checkpoint_goes_from_a_gpu_to_the_cpu_and_back(launcher, small_mnist, record_property):
    flags = ["--script", "mlp", "--dataset", small_mnist, *FLAGS, "--dropout", 0.1, "--dtype", "float64"]
    launcher("single_gpu", *run_many.words("mlp", [*flags, "--output_dir", "whole"]), script=run_many.FILE)
    for config, source, step, name in (("cpu", "whole", 10, "on_cpu"), ("single_gpu", "on_cpu", CUT, "back")):
        resumed = [*flags[:2], "--back_to", source, step, name, *flags[2:], "--resume", "--output_dir", name]
        launcher(config, *run_many.words("mlp", resumed), script=run_many.FILE)
    launches = run_reader.launches(launcher.folder / "back")
    assert [launch["from_step"] for launch in launches] == [0, 10, CUT]
    losses, weights = differences(launcher.folder / "whole", launcher.folder / "back", STEPS)
    record_property("figure", f"loss {losses:.1e}, weights {weights:.1e}")
    record_property("tolerance", TOLERANCE["float64"])
    assert max(losses, weights) <= TOLERANCE["float64"]


def test_two_launchers_on_this_machine_are_two_machines(launcher, gpus, small_mnist, record_property, monkeypatch):
    needs(2, gpus)
    flags = ["--dataset", small_mnist, *FLAGS, "--timeout_s", 60, "--dtype", "float64", "--output_dir", "two"]
    options = ["--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    running = []
    for rank in (0, 1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
        own = [*options, "--machine_rank", rank]
        running.append(launcher.start("multi_node", *flags, script="mlp", launch_flags=own))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for process in running:
        launcher.wait(process)
    launcher("single_gpu", *run_many.words("mlp", [*flags[:-1], "one"]), script=run_many.FILE)
    losses, weights = differences(launcher.folder / "one", launcher.folder / "two", STEPS)
    record_property("figure", f"loss {losses:.1e}, weights {weights:.1e}")
    assert max(losses, weights) <= TOLERANCE["float64"]


def test_fp16_skips_steps_that_overflow_and_resumes_with_the_scale(launcher, small_mnist, record_property, request):
    script, flags = ["--script", Path(__file__)], ["overflow", "mnist_mlp", "--dataset", small_mnist, *FLAGS]
    whole = [*script, *flags, "--output_dir", "whole"]
    resumed = [*script, "--back_to", "whole", CUT, "resumed", *flags, "--resume", "--output_dir", "resumed"]
    stand_ins = request.config.option.stand_ins
    options = {"launch_flags": ["--mixed_precision", "no" if stand_ins else "fp16"], "script": run_many.FILE}
    launcher("single_gpu", *run_many.words("mnist_mlp", whole, resumed), **options)
    run, other = (launcher.folder / name for name in ("whole", "resumed"))
    losses = run_reader.losses(run)
    assert losses[-1] < losses[0]
    assert run_reader.losses(other) == losses
    assert run_reader.weights(other).keys() == run_reader.weights(run).keys()
    files = [sorted(run_reader.last_checkpoint(folder).glob("*.safetensors")) for folder in (run, other)]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    record_property("figure", "in float32: a CPU has no scaler")
    if not stand_ins:
        scales = [
            read_checkpoint(run_reader.last_checkpoint(each))[0]["state"]["scaler"]["scale"] for each in (run, other)
        ]
        record_property("figure", f"scale {scales[0]:g} after {SCALE:g}, loss {losses[0]:.2f} to {losses[-1]:.2f}")
        assert scales[0] == scales[1] < SCALE


def test_equal_runs_have_the_same_bits_if_deterministic(launcher, gpus, tiny_mnist, texts, record_property):
    """On one process and on several; without --deterministic the count is reported, and not judged."""
    text = ["--script", "transformer", "--dataset", texts, *TEXT, "--dropout", 0.1, "--max_steps", 6]
    text += ["--batch_size", 4 * max(gpus, 2)]
    images = ["--script", "resnet50", "--dataset", tiny_mnist, "--max_steps", 3, "--num_workers", 0]
    images += ["--batch_size", 4 * max(gpus, 2)]
    pairs = {"transformer": text, "resnet50": images}
    figures, wrong = [], []
    for config in ("single_gpu", "ddp")[: min(gpus, 2)]:
        for flag in ("--deterministic", ""):
            names = [f"{config}{flag}_{name}_{time}" for name in pairs for time in "12"]
            runs = [
                [*pairs[name.split("_")[-2]], *flag.split(), "--log_every", 1, "--output_dir", name] for name in names
            ]
            launcher(config, *run_many.words("mlp", *runs), script=run_many.FILE)
            for one, two in zip(names[::2], names[1::2], strict=True):
                bits = [(launcher.folder / name / "model.safetensors").read_bytes() for name in (one, two)]
                figures.append(f"{one[:-2]}: {'equal' if bits[0] == bits[1] else 'different'}")
                wrong += [one] if flag and bits[0] != bits[1] else []
    record_property("figure", ", ".join(figures))
    assert not wrong


def test_each_replica_has_its_own_masks_and_a_resumed_run_the_same(launcher, gpus, texts, record_property):
    """Of nn.Dropout in nn.DataParallel's replicas; steps 3 and 4 are resumed, in the middle of an epoch."""
    script, flags = ["--script", Path(__file__)], ["counted masks", "transformer", "--dataset", texts, *TEXT]
    flags += ["--dropout", 0.5, "--batch_size", 4 * gpus, "--max_steps", 4, "--num_tokens", 2]
    whole = [*script, *flags, "--checkpoint_every", 2, "--output_dir", "whole"]
    resumed = [*script, "--back_to", "whole", 2, "resumed", *flags, "--resume", "--output_dir", "resumed"]
    launcher("dp", *run_many.words("mlp", whole, resumed), script=run_many.FILE)
    masks, again = (json.loads((launcher.folder / name / "masks.json").read_text()) for name in ("whole", "resumed"))
    different = len(set(map(tuple, masks.values())))
    record_property("figure", f"{different} different masks of {len(masks)}: {str(again)[:100]}")
    assert different == len(masks) == (gpus if torch.cuda.is_available() else 1)
    assert again == {device: counts[len(counts) // 2 :] for device, counts in masks.items()}


def test_a_save_copies_into_pinned_memory(tmp_path):
    accelerator = Accelerator()
    saver = Checkpoints(accelerator, tmp_path / "run", {"model": nn.Linear(3, 3, device=accelerator.device)}, {})
    saver.save(1, {})
    saver.wait()
    assert saver.copies["model.safetensors"]["weight"].is_pinned() == torch.cuda.is_available()


def test_the_launcher_starts_as_many_processes_as_it_says(launcher, gpus, small_mnist, record_property):
    """--gpu_ids and --mixed_precision as flags need --num_processes, see ddp.yaml; more processes than GPUs end."""
    needs(2, gpus)
    flags = ["--dataset", small_mnist, *FLAGS, "--max_steps", 2, "--output_dir", "run"]
    ids = [] if not torch.cuda.is_available() else ["--gpu_ids", "1,0"]
    launcher("ddp", *flags, launch_flags=[*ids, "--mixed_precision", "bf16", "--num_processes", 2])
    assert run_reader.launches(launcher.folder / "run")[0]["num_processes"] == 2
    if ids:
        options = {"launch_flags": ["--num_processes", gpus + 1], "check": False, "timeout": 60}
        done = launcher("ddp", *flags[:-1], "more", **options)
        record_property("figure", done.stderr.strip().splitlines()[0][:160])
        assert done.returncode != 0
        assert "would share a GPU" in done.stderr


def test_the_doctor_finds_nothing_that_would_fail(launcher, record_property):
    done = launcher.python(ROOT / "tools" / "doctor", check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("error", "warning", "No problems"))]
    record_property("figure", "; ".join(said)[:300])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("fault", "variables"),
    [
        *((fault, "") for fault in ENDS),
        ("kill -9", "TORCH_DIST_USE_NCCL2=0"),
        ("one collective more", "TORCH_DIST_USE_NCCL2=0"),
    ],
)
def test_a_fault_ends_the_run_with_a_sentence(
    launcher, gpus, small_mnist, record_property, monkeypatch, fault, variables
):
    says, processes = ENDS[fault]
    needs(processes, gpus)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "8")  # seconds that the launcher waits, instead of 30
    if variables:
        monkeypatch.setenv(*variables.split("="))
    flags = [fault, "mnist_mlp", "--dataset", small_mnist, *FLAGS]
    flags += ["--max_steps", NEVER, "--checkpoint_every", NEVER]
    flags += ["--timeout_s", TIMEOUT_S, "--output_dir", "run", "--log_every", AT_STEP]
    process = launcher.start("ddp", *flags, script=Path(__file__).with_suffix(""), stderr=subprocess.STDOUT)
    text, late = "", threading.Timer(120, launcher.end)
    late.start()
    for line in process.stdout:
        text += line
        if f"step {AT_STEP}/" in line:
            break
    late.cancel()
    began = time.monotonic()
    if fault == "SIGTERM":
        process.terminate()
    if fault == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    try:
        text += process.communicate(timeout=2 * TIMEOUT_S + 40)[0]
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there after {time.monotonic() - began:.0f} s\n{text[-3000:]}")
    found = re.search(f"^.*({says}).*$", text, re.MULTILINE)
    said = found[0][:160] if found else "(nothing)"
    record_property("figure", f"exit code {process.returncode} after {time.monotonic() - began:.0f} s: {said}")
    assert process.returncode != 0
    assert found, text[-3000:]


if __name__ == "__main__":
    main()
