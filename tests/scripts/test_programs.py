"""Five programs as users write them (tests/programs), each copied with utils/ into an empty folder.

Their models, data, losses and metrics are their own; the promises are ours: the same numbers on any
topology, a resume bit by bit, and every test sample once.
"""

import shutil

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from fakes import fake_accelerator

# What each is run with, the tolerance of its numbers, the size of its test set, and its models.
PROGRAMS = {
    "cnn": ([], 1e-6, 101, ["model"]),
    "regression": (["--dtype", "float64"], 1e-12, 77, ["model"]),
    "text": ([], 1e-6, 501, ["model"]),
    "gan": ([], 1e-6, 61, ["generator", "discriminator"]),
    "hub_images": (["--dataset"], 1e-6, 203, ["model"]),
}
CHECKPOINTS = ["--checkpoint_every", 5, "--keep_checkpoints", 0]


@pytest.fixture(scope="module")
def runs(shared_launcher, small_mnist):
    """A folder for each program, with the copy and its runs in it.

    one, accumulated: on one process, with 1 and 2 accumulation steps; two, three: on as many
    processes. one_resumed and two_resumed go on from step 5, in the middle of an epoch.
    """
    top = shared_launcher.folder
    launches = {1: [], 2: [], 3: []}
    for name, (flags, *_) in PROGRAMS.items():
        folder = top / name
        shutil.copytree(ROOT / "utils", folder / "utils", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests" / "programs").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "programs" / f"{name}.py", folder / "tests" / "programs")
        flags = [*flags, *([small_mnist] if flags == ["--dataset"] else [])]
        plain = ["--script", folder / "tests" / "programs" / f"{name}.py"]
        whole = [*flags, *CHECKPOINTS]

        def resumed(run, whole=whole, plain=plain, folder=folder):
            go_on = ["--back_to", folder / run, 5, folder / f"{run}_resumed"]
            return [*plain, *go_on, *whole, "--resume", "--output_dir", folder / f"{run}_resumed"]

        accumulated = ["--gradient_accumulation_steps", 2, "--output_dir", folder / "accumulated"]
        launches[1] += [
            [*plain, *whole, "--output_dir", folder / "one"],
            [*plain, *flags, *accumulated],
            resumed("one"),
        ]
        launches[2] += [[*plain, *whole, "--output_dir", folder / "two"], resumed("two")]
        launches[3] += [[*plain, *flags, "--output_dir", folder / "three"]]
    for processes, words in launches.items():
        config, launch_flags = ("cpu", []) if processes == 1 else ("cpu_ddp", ["--num_processes", processes])
        shared_launcher(
            config, *run_many.words("mnist_mlp", *words), script=run_many.FILE, launch_flags=launch_flags, timeout=300
        )
    return top


def weights(run, name):
    return {
        f"{model}.{key}": tensor
        for model in PROGRAMS[name][3]
        for key, tensor in run_reader.weights(run, model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("other", ["accumulated", "two", "three"])
def test_processes_and_accumulation_change_no_number(runs, name, other):
    tolerance = PROGRAMS[name][1]
    one, compared = run_reader.lines(runs / name / "one"), run_reader.lines(runs / name / other)
    assert [(line["split"], line["step"]) for line in compared] == [(line["split"], line["step"]) for line in one]
    largest = 0.0
    for line, expected in zip(compared, one, strict=True):
        assert line.keys() == expected.keys()
        for metric in line.keys() - {"split"}:
            difference = abs(line[metric] - expected[metric]) / max(abs(expected[metric]), 1e-3)
            largest = max(largest, difference)
    reference, own = weights(runs / name / "one", name), weights(runs / name / other, name)
    assert own.keys() == reference.keys()
    moved = max(float((own[key] - tensor).abs().max() / tensor.abs().max()) for key, tensor in reference.items())
    print(f"{name}, {other}: largest relative difference of a metric {largest:.1e}, of a weight {moved:.1e}")
    assert largest <= tolerance
    assert moved <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("run", ["one", "two"])
def test_a_resume_in_the_middle_of_an_epoch_is_bit_by_bit_the_same(runs, name, run):
    whole, resumed = runs / name / run, runs / name / f"{run}_resumed"
    (launch,) = run_reader.launches(resumed)[1:]
    assert launch["from_step"] == 5
    assert run_reader.lines(resumed) == run_reader.lines(whole)
    for model in PROGRAMS[name][3]:
        file = f"{model}.safetensors"
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_test_sample_counts_once(runs, name):
    for run in ("one", "accumulated", "two", "three"):
        summary = run_reader.summary(runs / name / run)
        assert summary["test_samples"] == PROGRAMS[name][2]


def test_weights_of_a_mean_are_those_of_the_words(small_mnist):
    """The text program's loss over a step is the mean over its tokens, however they are spread
    over processes."""
    from tests.programs import text
    from utils.loader import GlobalLoader

    lines = text.make_lines(11, 0)
    model = text.CharGRU().double()
    tokens = text.pad(lines)
    losses, _ = text.losses_and_accuracies(model, tokens)
    expected = (losses * text.count_targets(tokens)).sum() / text.count_targets(tokens).sum()
    total = 0.0
    for accumulation in (1, 3):
        loader = GlobalLoader(
            lines,
            11,
            fake_accelerator(),
            seed=0,
            accumulation=accumulation,
            collate_fn=text.pad,
            loss_weights=text.count_targets,
        )
        parts = [batch.mean_loss(text.losses_and_accuracies(model, batch.data)[0]) for batch in loader.epoch()]
        total = sum(parts) / accumulation  # as accelerator.backward divides
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
