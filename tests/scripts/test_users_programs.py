"""Models of other libraries, as users bring them (tests/programs), keep the promises.

Their micro-batches are of unequal size, and the last step of an epoch (29 samples in steps of 7) and of a test (13 in
steps of 6) has a single sample: all micro-batches but one get a stand-in.
"""

import importlib.util
from itertools import pairwise

import pytest
import run_many
import run_reader
from conftest import ROOT
from run_reader import lines
from same_numbers import largest_difference

# Name, and the library that it needs beside ours.
PROGRAMS = {
    "gpt2": "transformers",
    "bert": "transformers",
    "timm_vit": "timm",
    "packed_lstm": "torch",
    "faster_rcnn": "torchvision",
    "vae": "torch",
    "lbfgs": "torch",
}
QUICK = ["packed_lstm", "vae", "lbfgs"]  # in this process, without a launch
# The model samples boxes in each micro-batch, so only runs with as many of these per step have the same numbers.
SAMPLES_IN_MICRO_BATCHES = ["faster_rcnn"]
# Runs are named after their processes and accumulation steps.
PAIRS = [("one_1", "one_2"), ("one_1", "two_1"), ("one_2", "two_1"), ("one_4", "two_2")]
COMPARED = [
    (name, one, other)
    for name in PROGRAMS
    for one, other in PAIRS
    if one != "one_1" or name not in SAMPLES_IN_MICRO_BATCHES
]
# transformers computes this loss in float32; each step of L-BFGS doubles a difference.
TOLERANCE = {"gpt2": 1e-6, "lbfgs": 1e-8}
FLAGS = ["--float64", "--checkpoint_every", 3, "--keep_checkpoints", 0]

INSTALLED = [name for name, library in PROGRAMS.items() if importlib.util.find_spec(library)]
each_program = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(scope="module")
def runs(shared_launcher):
    """Runs of each program that can be imported: on one process with 1, 2 and 4 accumulation steps, on two processes
    with 1 and 2; and the first and the fourth of these resumed from step 3."""
    top = shared_launcher.folder
    for config, name, steps in (("cpu", "one", (1, 2, 4)), ("cpu_ddp", "two", (1, 2))):
        launches = []
        for program in INSTALLED:
            plain = ["--script", ROOT / "tests" / "programs" / f"{program}.py"]
            for k in steps:
                accumulation = ["--gradient_accumulation_steps", k]
                launches.append([*plain, *FLAGS, *accumulation, "--output_dir", top / program / f"{name}_{k}"])
            folder, again = top / program / f"{name}_1", top / program / f"{name}_resumed"
            go_on = ["--back_to", folder, 3, again, *FLAGS, "--resume", "--output_dir", again]
            launches.append([*plain, *go_on])
        shared_launcher(config, *run_many.words("mnist_mlp", *launches), script=run_many.FILE, timeout=300)
    return top


@pytest.fixture
def skip_if_missing(name):
    pytest.importorskip(PROGRAMS[name])


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@pytest.mark.parametrize(("name", "one", "other"), COMPARED)
def test_processes_and_accumulation_change_no_number(runs, name, one, other):
    largest = largest_difference(runs / name / one, runs / name / other)
    print(f"{name}, {other} against {one}: largest relative difference {largest:.1e}")
    assert largest <= TOLERANCE.get(name, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@each_program
@pytest.mark.parametrize("run", ["one", "two"])
def test_a_resume_in_the_middle_of_an_epoch_is_bit_by_bit_the_same(runs, name, run):
    whole, resumed = runs / name / f"{run}_1", runs / name / f"{run}_resumed"
    assert run_reader.launches(resumed)[1]["from_step"] == 3
    assert lines(resumed) == lines(whole)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "lbfgs"])
def test_each_test_sample_counts_once(runs, name):
    for run in ("one_1", "one_4", "two_1", "two_2"):
        assert run_reader.summary(runs / name / run)["test_samples"] == 13


@pytest.mark.parametrize("name", QUICK)
def test_accumulation_changes_no_number(tmp_path, name):
    for k in (1, 2):
        run_many.run(name, ["--float64", "--gradient_accumulation_steps", k, "--output_dir", tmp_path / str(k)])
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= TOLERANCE.get(name, 1e-9)


def test_lbfgs_lowers_the_loss_in_each_step(tmp_path):
    run_many.run("lbfgs", ["--output_dir", tmp_path / "run"])
    losses = run_reader.losses(tmp_path / "run")
    assert len(losses) == 10
    assert all(after < before for before, after in pairwise(losses))
