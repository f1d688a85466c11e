"""Every script once on each CPU config, launched as a user does, as short as it can be.

The quick ones: mnist_mlp.py on both configs, and the other training scripts on two processes.
"""

import pytest
import run_reader
from conftest import ROOT

# The least that each does; the others' --dataset is set below.
FLAGS = {
    "mnist_mlp": ["--max_steps", 2, "--batch_size", 64],
    "resnet50": ["--max_steps", 1, "--batch_size", 4],
    "gradient_accumulation": ["--max_steps", 1, "--batch_size", 64, "--gradient_accumulation_steps", 2],
    "model_split": ["--max_steps", 1, "--batch_size", 8, "--norm", "group"],
    "transformer": ["--max_steps", 1, "--vocabulary", 257, "--dataset", ROOT / "accelerate_configs"],
    "from_scratch/ddp": ["--num_epochs", 1, "--algorithm", "ring"],
    "from_scratch/data_parallel": ["--num_steps", 2, "--batch_size", 12],
    "from_scratch/collectives": ["--sizes", 8, "--repetitions", 1, "--warmup", 0],
    "from_scratch/gil": ["--rounds", 1],
    "from_scratch/tutorial": ["--num_epochs", 1],
    "from_scratch/averaging": ["--size_mib", 1, "--repetitions", 1, "--warmup", 0],
    "from_scratch/async_sgd": ["--num_epochs", 1, "--sleep_ms", 1],
}
NO_IMAGES = {"transformer", "from_scratch/collectives", "from_scratch/averaging", "from_scratch/gil"}
SEVERAL_PROCESSES = {"from_scratch/averaging", "from_scratch/async_sgd", "from_scratch/collectives"}
ONE_PROCESS = {"from_scratch/data_parallel", "from_scratch/gil"}  # their own tests run them on one
TRAINING = {"mnist_mlp", "resnet50", "gradient_accumulation", "model_split", "transformer"}
RESNETS = {"resnet50", "model_split"}  # they test on 23 images


def test_every_script_is_here():
    folder = ROOT / "scripts"
    programs = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.py")}
    assert programs - {"from_scratch/network_timing"} == set(FLAGS)


QUICK = [("mnist_mlp", "cpu"), *((script, "cpu_ddp") for script in sorted(TRAINING))]
CASES = [(script, "cpu") for script in FLAGS if script not in SEVERAL_PROCESSES]
CASES += [(script, "cpu_ddp") for script in FLAGS]
CASES = [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]


@pytest.mark.parametrize(("script", "config"), CASES)
def test_a_script_runs(launcher, small_mnist, tiny_mnist, script, config):
    flags = list(FLAGS[script])
    if script not in NO_IMAGES:
        flags += ["--dataset", tiny_mnist if script in RESNETS else small_mnist]
    runs_here = script not in ONE_PROCESS or config == "cpu"
    done = launcher(config, *flags, "--output_dir", "run", script=script, check=runs_here)
    run = launcher.folder / "run"
    if not runs_here:
        assert "error: " in done.stderr
        assert "use cpu.yaml" in done.stderr
        assert done.returncode != 0
        assert not run.exists()
        return
    assert "Traceback" not in done.stderr
    record = run_reader.record(run)
    launch = record["launches"][0] if script in TRAINING else record
    assert launch["num_processes"] == {"cpu": 1, "cpu_ddp": 2}[config]
    assert done.stdout.count("done: ") == 1
    if script in TRAINING:
        summary = run_reader.summary(run)
        assert summary["step"] == FLAGS[script][1]
        if script not in NO_IMAGES:
            assert summary["test_samples"] == (23 if script in RESNETS else 203)
        assert (run / "model.safetensors").stat().st_size > 1000
