"""The same numbers on every topology: 1, 2 and 4 processes x 1, 2 and 4 accumulation steps; three of them in float32.

pytest tests/distributed/test_parity.py -n 0 -rP -m "slow or not slow"    # the table
"""

from pathlib import Path

import pytest
import run_many
import run_reader
import torch
from same_numbers import TOLERANCE, differences

# 4 x 16 steps, the last of each epoch smaller. The learning rate is the default one, scaled to
# the batch.
STEPS = 4 * 16
SIZES = (1, 2, 4)
FLAGS = ["--num_epochs", 4, "--batch_size", 64, "--lr", 1e-3, "--hidden", 64, "--dropout", 0.1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 1000]  # no checkpoint but the last
CHECKPOINTS = ["--checkpoint_every", 10, "--keep_checkpoints", 0]


@pytest.fixture(scope="module")
def runs(shared_launcher, small_mnist) -> Path:
    """A folder with the run of each type and topology.

    `float64-2x4` is the run of 2 processes x 4 accumulation steps. Those of several processes without
    accumulation have a checkpoint after each 10 steps. With four processes, `four` continues step 30 of the run of two,
    and `again` that of the run of four.
    """
    for processes in SIZES:
        flags = []
        for dtype, accumulation in (*(("float64", each) for each in SIZES), ("float32", processes)):
            own = ["--gradient_accumulation_steps", accumulation, "--dtype", dtype]
            own += ["--output_dir", f"{dtype}-{processes}x{accumulation}"]
            flags.append(["--dataset", small_mnist, *FLAGS, *own])
        resumable = [*flags[0], *CHECKPOINTS]
        if processes > 1:
            flags[0] = resumable
        if processes == 4:
            for saved, name in (("float64-2x1", "four"), ("float64-4x1", "again")):
                flags.append(["--back_to", saved, 30, name, *resumable, "--resume", "--output_dir", name])
        config, launch_flags = ("cpu", []) if processes == 1 else ("cpu_ddp", ["--num_processes", processes])
        words = run_many.words("mlp", *flags)
        shared_launcher(config, *words, script=run_many.FILE, launch_flags=launch_flags, timeout=300)
    return shared_launcher.folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("processes", SIZES)
def test_processes_and_accumulation_change_nothing(runs, dtype, processes):
    for accumulation in SIZES if dtype == "float64" else [processes]:
        name = f"{dtype}-{processes}x{accumulation}"
        (launch,) = run_reader.launches(runs / name)
        assert (launch["num_processes"], launch["gradient_accumulation_steps"]) == (processes, accumulation)
        losses, weights = differences(runs / f"{dtype}-1x1", runs / name, STEPS)
        print(f"{dtype} {processes} processes x {accumulation} accumulation: loss {losses:.1e}, weights {weights:.1e}")
        assert losses <= TOLERANCE[dtype]
        assert weights <= TOLERANCE[dtype]


@pytest.mark.slow
def test_a_resumed_run_of_four_processes_has_the_same_bits(runs):
    """With two, gradients are added up in one order only; with more, in an order that DDP's buckets decide."""
    assert [launch["from_step"] for launch in run_reader.launches(runs / "again")] == [0, 30]
    assert run_reader.final_models(runs / "again") == run_reader.final_models(runs / "float64-4x1")


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_accumulation(runs, small_mnist, tmp_path):
    """The weights of one process all along.

    Two processes, then one; and two, then four, then one with accumulation.
    """
    flags = ["--dataset", small_mnist, *FLAGS, "--dtype", "float64", *CHECKPOINTS, "--resume"]
    run_many.back_to(runs / "float64-2x1", 50, tmp_path / "one")
    run_many.run("mlp", [*flags, "--output_dir", tmp_path / "one"])
    run_many.back_to(runs / "four", 60, tmp_path / "accumulated")
    accumulated = ["--gradient_accumulation_steps", 4, "--output_dir", tmp_path / "accumulated"]
    run_many.run("mlp", [*flags, *accumulated])
    for run, went_on in (
        (tmp_path / "one", [(2, 0), (1, 50)]),
        (runs / "four", [(2, 0), (4, 30)]),
        (tmp_path / "accumulated", [(2, 0), (4, 30), (1, 60)]),
    ):
        launches = run_reader.launches(run)
        assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == went_on
        losses, weights = differences(runs / "float64-1x1", run, STEPS)
        assert max(losses, weights) <= TOLERANCE["float64"]


@pytest.mark.slow
def test_several_runs_in_one_launch_are_as_many_launches(runs, launcher, small_mnist):
    """Bit by bit: what the tests above prove holds for separate launches."""
    flags = ["--dataset", small_mnist, *FLAGS, "--gradient_accumulation_steps", 2]
    launcher("cpu_ddp", *flags, "--output_dir", "run", script="mlp")
    run, other = launcher.folder / "run", runs / "float32-2x2"  # the last of the launch
    assert run_reader.lines(other) == run_reader.lines(run)
    other_weights = run_reader.weights(other)
    assert all(torch.equal(other_weights[name], tensor) for name, tensor in run_reader.weights(run).items())
