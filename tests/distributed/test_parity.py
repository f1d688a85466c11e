"""The same numbers on every topology: 1, 2 and 4 processes x 1, 2 and 4 accumulation steps; three of them in float32.

pytest tests/distributed/test_parity.py -n 0 -rP -m "slow or not slow"    # the table
"""

import pytest
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
def made(runs, small_mnist):
    """By type, processes and accumulation, and by name those that go on with another one."""
    flags, found = ["mlp", "--dataset", small_mnist, *FLAGS], {}
    on = {n: ("cpu",) if n == 1 else ("cpu_ddp", "--num_processes", n) for n in SIZES}
    for processes in SIZES:
        for dtype, accumulation in (*(("float64", each) for each in SIZES), ("float32", processes)):
            more = ["--gradient_accumulation_steps", accumulation, "--dtype", dtype]
            more += CHECKPOINTS if accumulation == 1 else []
            found[dtype, processes, accumulation] = runs(*flags, *more, on=on[processes])
    two, four = found["float64", 2, 1], found["float64", 4, 1]
    flags += ["--dtype", "float64", *CHECKPOINTS]
    found["two, one"] = runs(*flags, resumes=two, at=50)
    found["four, four"] = runs(*flags, on=on[4], resumes=four, at=30)
    found["two, four"] = runs(*flags, on=on[4], resumes=two, at=30)
    accumulated = ["--gradient_accumulation_steps", 4]
    found["two, four, one"] = runs(*flags, *accumulated, resumes=found["two, four"], at=60)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("processes", SIZES)
def test_processes_and_accumulation_change_nothing(made, dtype, processes):
    for accumulation in SIZES if dtype == "float64" else [processes]:
        run = made[dtype, processes, accumulation].folder
        (launch,) = run_reader.launches(run)
        assert (launch["num_processes"], launch["gradient_accumulation_steps"]) == (processes, accumulation)
        losses, weights = differences(made[dtype, 1, 1].folder, run, STEPS)
        print(f"{dtype} {processes} processes x {accumulation} accumulation: loss {losses:.1e}, weights {weights:.1e}")
        assert losses <= TOLERANCE[dtype]
        assert weights <= TOLERANCE[dtype]


@pytest.mark.slow
def test_a_resumed_run_of_four_processes_has_the_same_bits(made):
    """With two, gradients are added up in one order only; with more, in an order that DDP's buckets decide."""
    assert [launch["from_step"] for launch in run_reader.launches(made["four, four"].folder)] == [0, 30]
    assert made["four, four"].bits == made["float64", 4, 1].bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "went_on"),
    [
        ("two, one", [(2, 0), (1, 50)]),
        ("two, four", [(2, 0), (4, 30)]),
        ("two, four, one", [(2, 0), (4, 30), (1, 60)]),
    ],
)
def test_a_run_goes_on_with_other_processes_and_accumulation(made, name, went_on):
    """The weights of one process all along."""
    launches = run_reader.launches(made[name].folder)
    assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == went_on
    assert max(differences(made["float64", 1, 1].folder, made[name].folder, STEPS)) <= TOLERANCE["float64"]


@pytest.mark.slow
def test_several_runs_in_one_launch_are_as_many_launches(made, launcher, small_mnist):
    """Bit by bit: what the tests above prove holds for separate launches."""
    flags = ["--dataset", small_mnist, *FLAGS, "--gradient_accumulation_steps", 2]
    launcher("cpu_ddp", *flags, "--output_dir", "run", script="mlp")
    run, other = launcher.folder / "run", made["float32", 2, 2].folder
    assert run_reader.lines(other) == run_reader.lines(run)
    other_weights = run_reader.weights(other)
    assert all(torch.equal(other_weights[name], tensor) for name, tensor in run_reader.weights(run).items())
