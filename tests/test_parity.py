"""The same numbers on every topology: real launches of 1, 2 and 4 processes x 1, 2 and 4 accumulation steps.

pytest tests/test_parity.py -n 0 -rP                                    # the table
pytest tests/test_parity.py --config_file accelerate_configs/ddp.yaml   # your own machine against one process of it
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
from conftest import ROOT

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# 14 x 16 updates, the last of each epoch smaller; the learning rate is the default one scaled to the batch.
FLAGS = ["--num_epochs", 14, "--batch_size", 64, "--lr", 1e-3, "--hidden", 64, "--dropout", 0.1, "--log_every", 1]


def result(run: Path):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, safetensors.torch.load_file(run / "model.safetensors")


def compare(reference, other) -> tuple[float, float]:
    """Largest relative difference of a loss, and of a weight to the largest of its tensor; the rest must be equal."""
    (lines, weights), (other_lines, other_weights) = reference, other
    assert len([line for line in lines if line["split"] == "train"]) == 14 * 16
    exact = ("split", "step", "epoch", "lr", "accuracy")
    assert [[line.get(n) for n in exact] for line in other_lines] == [[line.get(n) for n in exact] for line in lines]
    losses = max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(lines, other_lines, strict=True))
    assert weights.keys() == other_weights.keys()
    largest = max(float((other_weights[name] - w).abs().max() / w.abs().max()) for name, w in weights.items())
    return losses, largest


@pytest.fixture
def reference(launcher, small_mnist, request, made={}):  # noqa: B006  one for each dtype
    def reference(dtype, config):
        if (dtype, config) not in made:
            launcher(config, "--dataset", small_mnist, *FLAGS, "--dtype", dtype, "--output_dir", "reference")
            made[dtype, config] = result(launcher.folder / "reference")
        return made[dtype, config]

    return reference


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_and_accumulation_change_nothing(launcher, small_mnist, reference, request, dtype, processes):
    if request.config.getoption("config_file"):
        pytest.skip("--config_file asks for one config alone")
    for accumulation in (1, 2, 4):
        if (processes, accumulation) == (1, 1):
            continue
        run = launcher.folder / f"{processes}x{accumulation}"
        flags = ["--dataset", small_mnist, *FLAGS, "--dtype", dtype, "--output_dir", run]
        flags += ["--gradient_accumulation_steps", accumulation]
        config, launch_flags = ("cpu", []) if processes == 1 else ("cpu_ddp", ["--num_processes", processes])
        launcher(config, *flags, launch_flags=launch_flags)
        losses, weights = compare(reference(dtype, "cpu"), result(run))
        print(f"{dtype} {processes} processes x {accumulation} accumulation: loss {losses:.1e}, weights {weights:.1e}")
        assert losses <= TOLERANCE[dtype]
        assert weights <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_config_of_this_machine_changes_nothing(launcher, small_mnist, reference, request, dtype):
    """Skipped without --config_file, which names the config to compare with one process on the same kind of device."""
    config = request.config.getoption("config_file")
    if not config:
        pytest.skip("no --config_file given")
    run = launcher.folder / "run"
    path = str((Path(request.config.invocation_params.dir) / config).resolve())
    launcher(path, "--dataset", small_mnist, *FLAGS, "--dtype", dtype, "--output_dir", run)
    on_cpu = json.loads((run / "run.json").read_text())["launches"][0]["processes"][0]["device"] == "cpu"
    losses, weights = compare(reference(dtype, "cpu" if on_cpu else "single_gpu"), result(run))
    print(f"{dtype} {config}: loss {losses:.1e}, weights {weights:.1e}")
    assert losses <= TOLERANCE[dtype]
    assert weights <= TOLERANCE[dtype]


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_accumulation(launcher, small_mnist, reference):
    """Two processes, then one, then four, then one with accumulation: the weights of one process all along."""
    flags = ["--dataset", small_mnist, *FLAGS, "--dtype", "float64", "--output_dir", "run", "--keep_checkpoints", 0]
    run = launcher.folder / "run"
    launcher("cpu_ddp", *flags, "--checkpoint_every", 20)
    for step, config, more in (
        (100, "cpu", []),
        (60, "cpu_ddp", ["--num_processes", 4]),
        (20, "cpu", []),
    ):
        for path in (run / "checkpoints").glob("step_*"):
            if int(path.name[5:]) > step:
                path.rename(run / path.name)
        (run / "summary.json").unlink()
        accumulation = ["--gradient_accumulation_steps", 4] if step == 20 else []
        launcher(config, *flags, "--resume", *accumulation, launch_flags=more)
        losses, weights = compare(reference("float64", "cpu"), result(run))
        assert max(losses, weights) <= TOLERANCE["float64"]
        for path in run.glob("step_*"):
            path.rename(launcher.folder / f"{step}-{path.name}")


def test_the_readme_says_how_to_prove_a_machine():
    assert "pytest tests/test_parity.py -n 0 -rP --config_file" in (ROOT / "README.md").read_text()
