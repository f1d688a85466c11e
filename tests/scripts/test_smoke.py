"""Every script once on each CPU config, launched as a user does, as short as it can be."""

import json

import pytest
from conftest import ROOT

# The least that each does; the others' --dataset is set below.
FLAGS = {
    "mnist_mlp": ["--max_steps", 2, "--batch_size", 64],
    "resnet50": ["--max_steps", 1, "--batch_size", 4],
    "gradient_accumulation": ["--max_steps", 1, "--batch_size", 64, "--gradient_accumulation_steps", 2],
    "model_split": ["--max_steps", 1, "--batch_size", 8, "--norm", "group"],
    "ddp_from_scratch": ["--num_epochs", 1, "--algorithm", "ring"],
    "dp_from_scratch": ["--num_steps", 2, "--batch_size", 12],
    "collectives": ["--sizes", 8, "--repetitions", 1, "--warmup", 0],
    "averaging": ["--size_mib", 1, "--repetitions", 1, "--warmup", 0],
    "async_sgd": ["--num_epochs", 1, "--sleep_ms", 1],
}
NO_IMAGES = {"collectives", "averaging"}
SEVERAL_PROCESSES = {"averaging", "async_sgd"}  # their own tests run them on one
TRAINING = {"mnist_mlp", "resnet50", "gradient_accumulation", "model_split"}
RESNETS = {"resnet50", "model_split"}  # they test on 23 images


def test_every_script_is_here():
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == set(FLAGS)


CASES = [(script, "cpu") for script in FLAGS if script not in SEVERAL_PROCESSES]
CASES += [(script, "cpu_ddp") for script in FLAGS]


@pytest.mark.parametrize(("script", "config"), CASES)
def test_a_script_runs(launcher, small_mnist, tiny_mnist, script, config):
    flags = list(FLAGS[script])
    if script not in NO_IMAGES:
        flags += ["--dataset", tiny_mnist if script in RESNETS else small_mnist]
    runs_here = script != "dp_from_scratch" or config == "cpu"
    done = launcher(config, *flags, "--output_dir", "run", script=script, check=runs_here)
    run = launcher.folder / "run"
    if not runs_here:
        sentence = "error: nn.DataParallel runs in one process and here are 2: use cpu.yaml or dp.yaml"
        assert sentence in done.stderr
        assert done.returncode != 0
        assert not run.exists()
        return
    assert "Traceback" not in done.stderr
    if script == "collectives":
        says = {"cpu": "one process: there is nothing to send", "cpu_ddp": "give the right results"}
        assert says[config] in done.stdout
        return
    record = json.loads((run / "run.json").read_text())
    launch = record["launches"][0] if script in TRAINING else record
    assert launch["num_processes"] == {"cpu": 1, "cpu_ddp": 2}[config]
    assert done.stdout.count("done: ") == 1
    if script in TRAINING:
        summary = json.loads((run / "summary.json").read_text())
        assert summary["step"] == FLAGS[script][1]
        assert summary["test_samples"] == (23 if script in RESNETS else 203)
        assert (run / "model.safetensors").stat().st_size > 1000
