"""Programs as users write them, with models, data, losses and metrics of their own, keep the promises:
the same numbers on any topology, a resume bit by bit, and every test sample once.

The last step of an epoch and the last batch of a test are smaller than the others; in others_models.py they have a
single sample, and all micro-batches but one get a stand-in.
"""

import importlib.util
from itertools import pairwise
from typing import NamedTuple

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from fakes import fake_accelerator
from run_reader import lines
from same_numbers import largest_difference


class Program(NamedTuple):
    """A program of tests/programs, and the flags of a run.

    test_samples: None without a test. library: what it needs beside ours.
    """

    script: str
    flags: tuple = ()
    test_samples: int | None = 13
    tolerance: float = 1e-6
    library: str = "torch"


def model_of_others(name, tolerance=1e-9, library="torch", test_samples=13):
    return Program("others_models", ("--model", name, "--float64"), test_samples, tolerance, library)


PROGRAMS = {
    "cnn": Program("cnn", test_samples=101),
    "regression": Program("regression", ("--dtype", "float64"), 77, 1e-12),
    "text": Program("text", test_samples=501),
    "gan": Program("gan", test_samples=61),
    "hub_images": Program("hub_images", ("--dataset", "SMALL_MNIST"), 203),
    # transformers computes this loss in float32; each step of L-BFGS doubles a difference.
    "gpt2": model_of_others("gpt2", 1e-6, "transformers"),
    "bert": model_of_others("bert", library="transformers"),
    "timm_vit": model_of_others("timm_vit", library="timm"),
    "packed_lstm": model_of_others("packed_lstm"),
    "faster_rcnn": model_of_others("faster_rcnn"),
    "vae": model_of_others("vae"),
    "lbfgs": model_of_others("lbfgs", 1e-8, test_samples=None),
    # The recipes of guides/your_own_model.md.
    "warmup": Program("schedules", ("--recipe", "warmup"), 77),
    "plateau": Program("schedules", ("--recipe", "plateau"), 77),
    "two_optimizers": Program("schedules", ("--recipe", "two_optimizers"), 77),
    "compile": Program("schedules", ("--recipe", "compile"), 77),
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
INSTALLED = [name for name, program in PROGRAMS.items() if importlib.util.find_spec(program.library)]
each_program = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(scope="module")
def runs(shared_launcher, small_mnist):
    """Runs of each program that can be imported: on one process with 1, 2 and 4 accumulation steps, on two processes
    with 1 and 2; and the first and the fourth of these resumed from step 3, in the middle of an epoch."""
    top = shared_launcher.folder
    for config, name, steps in (("cpu", "one", (1, 2, 4)), ("cpu_ddp", "two", (1, 2))):
        launches = []
        for program in INSTALLED:
            script, flags, *_ = PROGRAMS[program]
            flags = [small_mnist if flag == "SMALL_MNIST" else flag for flag in flags]
            flags = [*flags, "--checkpoint_every", 3, "--keep_checkpoints", 0]
            script = ["--script", ROOT / "tests" / "programs" / f"{script}.py"]
            for k in steps:
                accumulation = ["--gradient_accumulation_steps", k]
                launches.append([*script, *flags, *accumulation, "--output_dir", top / program / f"{name}_{k}"])
            folder, again = top / program / f"{name}_1", top / program / f"{name}_resumed"
            launches.append([*script, "--back_to", folder, 3, again, *flags, "--resume", "--output_dir", again])
        shared_launcher(config, *run_many.words("mlp", *launches), script=run_many.FILE, timeout=400)
    return top


@pytest.fixture
def skip_if_missing(name):
    pytest.importorskip(PROGRAMS[name].library)


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@pytest.mark.parametrize(("name", "one", "other"), COMPARED)
def test_processes_and_accumulation_change_no_number(runs, name, one, other):
    largest = largest_difference(runs / name / one, runs / name / other)
    print(f"{name}, {other} against {one}: largest relative difference {largest:.1e}")
    assert largest <= PROGRAMS[name].tolerance


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@each_program
@pytest.mark.parametrize("run", ["one", "two"])
def test_a_resume_in_the_middle_of_an_epoch_is_bit_by_bit_the_same(runs, name, run):
    whole, resumed = runs / name / f"{run}_1", runs / name / f"{run}_resumed"
    assert run_reader.launches(resumed)[1]["from_step"] == 3
    assert lines(resumed) == lines(whole)
    files = [file.name for file in whole.glob("*.safetensors")]
    assert files
    for file in files:
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("skip_if_missing")
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.test_samples])
def test_each_test_sample_counts_once(runs, name):
    for run in ("one_1", "one_4", "two_1", "two_2"):
        assert run_reader.summary(runs / name / run)["test_samples"] == PROGRAMS[name].test_samples


@pytest.mark.slow
def test_the_learning_rates_follow_the_recipes(runs):
    rates = [line["lr"] for line in lines(runs / "warmup" / "one_1", "train")]
    assert rates == pytest.approx([0.01 * min(1, step / 8) for step in range(1, 21)])
    rates = [line["lr"] for line in lines(runs / "plateau" / "one_1", "train")]
    assert rates[0] == 0.01
    assert rates[-1] == 0.0025
    last = lines(runs / "two_optimizers" / "two_1")[-2]
    assert (last["body_lr"], last["head_lr"]) == (0.001, 0.01)


@pytest.mark.parametrize("name", QUICK)
def test_accumulation_changes_no_number(tmp_path, name):
    for k in (1, 2):
        flags = [*PROGRAMS[name].flags, "--gradient_accumulation_steps", k, "--output_dir", tmp_path / str(k)]
        run_many.run("others_models", flags)
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= PROGRAMS[name].tolerance


def test_lbfgs_lowers_the_loss_in_each_step(tmp_path):
    run_many.run("others_models", ["--model", "lbfgs", "--output_dir", tmp_path / "run"])
    losses = run_reader.losses(tmp_path / "run")
    assert len(losses) == 10
    assert all(after < before for before, after in pairwise(losses))


def test_weights_of_a_mean_are_those_of_the_words():
    """The text program's loss over a step is the mean over its tokens, however they are spread over processes."""
    from tests.programs import text
    from utils.loader import GlobalLoader

    texts = text.make_lines(11, 0)
    model = text.CharGRU().double()
    tokens = text.pad(texts)
    losses, _ = text.losses_and_accuracies(model, tokens)
    expected = (losses * text.count_targets(tokens)).sum() / text.count_targets(tokens).sum()
    options = {"collate_fn": text.pad, "loss_weights": text.count_targets}
    for accumulation in (1, 3):
        loader = GlobalLoader(texts, 11, fake_accelerator(), seed=0, accumulation=accumulation, **options)
        parts = [batch.mean_loss(text.losses_and_accuracies(model, batch.data)[0]) for batch in loader.epoch()]
        # accelerator.backward divides by the number of micro-batches.
        torch.testing.assert_close(sum(parts) / accumulation, expected, rtol=1e-12, atol=0)
