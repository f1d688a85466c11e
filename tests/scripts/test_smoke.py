"""The scripts on each CPU config, launched as a user does, as short as it can be.

Those in from_scratch/ are launched by their own tests.
"""

import itertools

import pytest
import run_reader
from conftest import ROOT, needs_torch

# The least that each does; the others' --dataset is set below.
TRAINING = {
    "mnist_mlp": ["--max_steps", 2, "--batch_size", 64],
    "resnet50": ["--max_steps", 1, "--batch_size", 4],
    "gradient_accumulation": ["--max_steps", 1, "--batch_size", 64, "--gradient_accumulation_steps", 2],
    "model_split": ["--max_steps", 1, "--batch_size", 8, "--norm", "group"],
    "transformer": ["--max_steps", 1, "--vocabulary", 257, "--dataset", ROOT / "accelerate_configs"],
}
RESNETS = {"resnet50", "model_split"}  # they test on 23 images
PROCESSES = {"cpu": 1, "cpu_ddp": 2}


def test_every_training_script_is_here():
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == set(TRAINING)


@pytest.mark.parametrize(
    ("script", "config"),
    [
        *itertools.product([name for name in TRAINING if name != "model_split"], PROCESSES),
        pytest.param("model_split", "cpu_ddp", marks=needs_torch("2.12")),  # on one process it splits nothing
    ],
)
def test_a_training_script_runs(launcher, small_mnist, tiny_mnist, script, config):
    flags = list(TRAINING[script])
    if script != "transformer":
        flags += ["--dataset", tiny_mnist if script in RESNETS else small_mnist]
    done = launcher(config, *flags, "--output_dir", "run", script=script)
    run = launcher.folder / "run"
    assert "Traceback" not in done.stderr
    assert done.stdout.count("done: ") == 1
    assert run_reader.launches(run)[0]["num_processes"] == PROCESSES[config]
    summary = run_reader.summary(run)
    assert summary["step"] == TRAINING[script][1]
    if script != "transformer":
        assert summary["test_samples"] == (23 if script in RESNETS else 203)
    assert (run / "model.safetensors").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("config", PROCESSES)
def test_the_tutorial_runs(launcher, small_mnist, config):
    flags = ["--num_epochs", 1, "--dataset", small_mnist, "--output_dir", "run"]
    done = launcher(config, *flags, script="from_scratch/tutorial")
    assert done.stdout.count("done: ") == 1
    assert run_reader.record(launcher.folder / "run")["num_processes"] == PROCESSES[config]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["data_parallel", "gil"])
def test_a_script_for_one_process_is_refused_on_two(launcher, script):
    done = launcher("cpu_ddp", "--output_dir", "run", script=f"from_scratch/{script}", check=False)
    assert done.returncode != 0
    assert "use cpu.yaml" in done.stderr
    assert not (launcher.folder / "run").exists()
