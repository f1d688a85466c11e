"""Programs as users write them, with models, data, losses and metrics of their own, keep the promises:
the same numbers on any topology, a resume bit by bit, and every test sample once.

The last step of an epoch and the last batch of a test are smaller than the others; in others_models.py they have a
single sample, and all micro-batches but one get a stand-in.
"""

import json
import re
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from run_reader import lines
from same_numbers import largest_difference

from utils.loader import GlobalLoader


class Program(NamedTuple):
    """A program of examples/, and the flags of a run.

    test_samples: None without a test. library: what it needs beside requirements.txt.
    """

    script: str
    flags: tuple = ()
    test_samples: int | None = 13
    tolerance: float = 1e-6
    library: str | None = None


def model_of_others(name, tolerance=1e-9, library=None, test_samples=13):
    return Program("others_models", ("--model", name, "--float64"), test_samples, tolerance, library)


PROGRAMS = {
    "cnn": Program("cnn", test_samples=101),
    "regression": Program("regression", ("--float64", "--num_epochs", "2", "--log_every", "1"), 77, 1e-12),
    "text": Program("text", test_samples=501),
    "gan": Program("gan", test_samples=61),
    "two_loaders": Program("two_loaders", ("--float64",), 61, 1e-12),
    "hub_images": Program("hub_images", ("--dataset", "SMALL_MNIST"), 203),
    "loss_inside": Program("loss_inside", ("--float64", "--dataset", "SMALL_MNIST"), 203, 1e-12),
    # transformers computes this loss in float32; each step of L-BFGS doubles a difference.
    "gpt2": model_of_others("gpt2", 1e-6, "transformers"),
    "gpt2_lora": model_of_others("gpt2_lora", 1e-6, "peft"),
    "bert": model_of_others("bert", library="transformers"),
    "timm_vit": model_of_others("timm_vit", library="timm"),
    "packed_lstm": model_of_others("packed_lstm"),
    "faster_rcnn": model_of_others("faster_rcnn"),
    "vae": model_of_others("vae"),
    "lbfgs": model_of_others("lbfgs", 1e-8, test_samples=None),
    "contrastive": Program("contrastive", ("--float64",), 31, 1e-9),
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


def param(name, *values):
    """A case of a test, with the mark `others` where the program needs a library."""
    library = PROGRAMS[name].library
    return pytest.param(name, *values, marks=pytest.mark.others(library) if library else ())


COMPARED = [
    param(name, one, other)
    for name in PROGRAMS
    for one, other in PAIRS
    if one != "one_1" or name not in SAMPLES_IN_MICRO_BATCHES
]


@pytest.fixture(scope="module")
def runs(request, shared_launcher, small_mnist):
    """Runs of each program that a chosen test looks at: on one process with 1, 2 and 4 accumulation steps, and on
    two processes with 1 and 2."""
    top = shared_launcher.folder
    tests = [item for item in request.session.items if item.path == request.path and "runs" in item.fixturenames]
    chosen = {item.callspec.params["name"] for item in tests if not item.get_closest_marker("skip")}
    for config, name, steps in (("cpu", "one", (1, 2, 4)), ("cpu_ddp", "two", (1, 2))):
        launches = []
        for program in [name for name in PROGRAMS if name in chosen]:
            script, flags, *_ = PROGRAMS[program]
            flags = [small_mnist if flag == "SMALL_MNIST" else flag for flag in flags]
            flags = [*flags, "--checkpoint_every", 3, "--keep_checkpoints", 0]
            script = ["--script", run_many.path_of(script)]
            for k in steps:
                accumulation = ["--gradient_accumulation_steps", k]
                launches.append([*script, *flags, *accumulation, "--output_dir", top / program / f"{name}_{k}"])
        shared_launcher(config, *run_many.words("mlp", *launches), script=run_many.FILE, timeout=400)
    return top


@pytest.mark.slow
@pytest.mark.parametrize(("name", "one", "other"), COMPARED)
def test_processes_and_accumulation_change_no_number(runs, name, one, other):
    largest = largest_difference(runs / name / one, runs / name / other)
    print(f"{name}, {other} against {one}: largest relative difference {largest:.1e}")
    assert largest <= PROGRAMS[name].tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", [param(name) for name, program in PROGRAMS.items() if program.test_samples])
def test_each_test_sample_counts_once(runs, name):
    for run in ("one_1", "one_4", "two_1", "two_2"):
        assert run_reader.summary(runs / name / run)["test_samples"] == PROGRAMS[name].test_samples


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warmup", "plateau", "two_optimizers"])
def test_the_learning_rates_follow_the_recipes(runs, name):
    *_, last = train_lines = lines(runs / name / "two_1", "train")
    if name == "two_optimizers":
        assert (last["body_lr"], last["head_lr"]) == (0.001, 0.01)
        return
    rates = [line["lr"] for line in train_lines]
    if name == "warmup":
        assert rates == pytest.approx([0.01 * min(1, step / 8) for step in range(1, 21)])
    else:
        assert (rates[0], rates[-1]) == (0.01, 0.0025)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_commands_in_an_example_are_those_that_it_takes(example, monkeypatch):
    commands = re.findall(rf"accelerate launch --config_file (\S+) examples/{example.name}(.*)", example.read_text())
    assert commands
    for config, flags in commands:
        assert (ROOT / config).exists()
        if example.stem != "own_metrics" or find_spec("torchmetrics"):
            monkeypatch.setattr("sys.argv", [str(example), *flags.split()])
            module = run_many.load(example.stem, example)
            if flags.strip() or example.stem != "plain_accelerate":
                module.parse_args()


@pytest.mark.parametrize("name", QUICK)
def test_accumulation_changes_no_number(tmp_path, name):
    for k in (1, 2):
        flags = [*PROGRAMS[name].flags, "--gradient_accumulation_steps", k, "--output_dir", tmp_path / str(k)]
        run_many.run("others_models", flags)
    assert largest_difference(tmp_path / "1", tmp_path / "2") <= PROGRAMS[name].tolerance


@pytest.mark.parametrize("repeats", [False, True], ids=["each item once", "an item twice in a step"])
def test_contrastive_losses_equal_one_graph_over_the_whole_batch(tmp_path, monkeypatch, repeats):
    def loader_with_repeats(*args, seed=None, **options):
        return GlobalLoader(*args, seed=seed, order=None if seed is None else with_repeats, **options)

    def with_repeats(epoch):
        return torch.randint(10, (100,))

    if repeats:
        monkeypatch.setattr("examples.contrastive.GlobalLoader", loader_with_repeats)
    for name, flags in ("two_passes", ["--gradient_accumulation_steps", 3]), ("one_graph", ["--one_graph"]):
        run_many.run("contrastive", ["--float64", *flags, "--output_dir", tmp_path / name])
    assert largest_difference(tmp_path / "two_passes", tmp_path / "one_graph") <= 1e-9
    losses = run_reader.losses(tmp_path / "one_graph")
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.slow
def test_folds_in_one_launch_train_alike_on_any_number_of_processes_and_when_resumed(launcher):
    """The folds share an accelerator or not. In the same launch, contrastive.py with virtual processes, of which one
    process has more than the others, so in a test too."""
    results = {}
    for processes in (1, 2, 3):
        top = launcher.folder / str(processes)
        runs = [["contrastive", "--float64", "--virtual_processes", 4, "--output_dir", top / "contrastive"]]
        runs += [["folds", "--output_dir", top / "own"]]
        shared = ["folds", "--one_accelerator", "--output_dir", top / "shared"]
        runs += [shared] if processes == 1 else [[*shared, "--trained_folds", 2], [*shared, "--resume"]]
        if processes == 1:
            assert [run_many.run(program, flags) for program, *flags in runs] == [None] * len(runs)
        else:
            words = [["--script", run_many.path_of(program), *flags] for program, *flags in runs]
            options = {"script": run_many.FILE, "launch_flags": ["--num_processes", processes]}
            done = launcher("cpu_ddp", *run_many.words("folds", *words), **options)
            assert done.stdout.count("nothing to do") == 2
            assert "destroy_process_group" not in done.stderr
        for name in ("own", "shared"):
            files = list((top / name).glob("rank_*.json"))
            assert len(files) == processes
            assert len({file.read_text() for file in files}) == 1
            results[name, processes] = json.loads(files[0].read_text())["losses"]
            assert results[name, processes] == pytest.approx(results[name, 1], rel=1e-12)
        assert lines(top / "contrastive") == lines(launcher.folder / "1" / "contrastive")
