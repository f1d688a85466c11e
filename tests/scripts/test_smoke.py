"""The scripts on each CPU config, launched as a user does, as short as it can be.

Those in from_scratch/ are launched by their own tests.
"""

import itertools

import pytest
import run_many
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


BAD_INPUT = [
    ("mnist_mlp", "--dataset nowhere/at/all", "--dataset nowhere/at/all is neither a folder with data nor a Hub id"),
    ("mnist_mlp", "--output_dir /proc/run", "--output_dir /proc/run cannot be written to"),
    ("resnet50", "--batch_size 1", "makes micro-batches of 1: BatchNorm needs 2 images or more"),
    ("resnet50", "--batch_size 6 --gradient_accumulation_steps 2 --mixup 0.2", "cutmix an even number"),
    ("resnet50", "--min_crop 1.005", "must be at least 0.01 and at most 1.0, got 1.005"),
    ("transformer", "--dim 20 --heads 4", "--dim 20 must be a multiple of 2 x --heads 4"),
    ("transformer", "--prompt a", "--prompt needs"),
    ("transformer", "--pretrained model.safetensors", "--pretrained needs --tokenizer"),
    ("model_split", "--num_stages 19", "19 stages are more than the 18 blocks of ResNet-50"),
    ("model_split", "--batch_size 63", "--batch_size 63 is not divisible by 1 pipeline x 4 micro-batches x 1"),
    ("model_split", "--num_stages 2 --split layer9.0", "layer9.0 must be 1 block in order, for 2 stages"),
    ("model_split", "--num_stages 3 --split layer3.0 layer2.0", "must be 2 blocks in order"),
    ("model_split", "--batch_size 8 --num_microbatches 8 --norm batch", "micro-batches of one sample"),
    ("model_split", "--batch_size 48 --norm batch --max_steps 2", "micro-batches of one sample"),  # the last step has 2
]


@pytest.mark.parametrize(("script", "flags", "sentence"), BAD_INPUT)
def test_bad_input_is_an_error_of_one_line_before_any_training(
    tmp_path, tiny_mnist, home, monkeypatch, capsys, script, flags, sentence
):
    monkeypatch.chdir(tmp_path)
    data = [] if script == "transformer" else ["--dataset", tiny_mnist]
    assert run_many.run(script, [*TRAINING[script], *data, *flags.split()]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert sentence in error
    assert "train epoch" not in out
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "config", "flags"), [("tutorial", "cpu_ddp", ["--num_epochs", 1]), ("gil", "cpu", ["--rounds", 2])]
)
def test_a_script_without_numbers_of_its_own_runs_and_leaves_a_record(launcher, small_mnist, script, config, flags):
    data = ["--dataset", small_mnist] if script == "tutorial" else []
    done = launcher(config, *flags, *data, "--output_dir", "run", script=f"from_scratch/{script}")
    assert done.stdout.count("done: ") == 1
    record = run_reader.record(launcher.folder / "run")
    assert record["num_processes"] == PROCESSES[config]
    if script == "gil":
        assert all(min(values) > 0 for ways in record["results"].values() for values in ways.values())
        assert (launcher.folder / "run" / "gil.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_script_for_one_process_is_refused_on_two(launcher):
    done = launcher("cpu_ddp", "--output_dir", "run", script="from_scratch/data_parallel", check=False)
    assert done.returncode != 0
    assert "use cpu.yaml" in done.stderr
    assert not (launcher.folder / "run").exists()
