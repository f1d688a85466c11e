"""Programs as users write them, with models, data, losses and metrics of their own, keep the promises:
the same numbers on any topology, a resume on another one, and every test sample once.

The last step of an epoch has fewer samples than micro-batches where it can, so some get a stand-in, which must count
nothing. In others_models.py a single sample is left there, and in the last batch of a test.
"""

import json
from typing import NamedTuple

import pytest
import run_many
import run_reader
import safetensors.torch
import torch
from run_reader import lines
from same_numbers import largest_difference

from utils.loader import GlobalLoader
from utils.sampler import GlobalSampler


class Program(NamedTuple):
    """A program of examples/ or a script, and the flags of a run.

    test_samples: None without a test. library: what it needs beside requirements.txt.
    """

    script: str
    flags: str = ""
    test_samples: int | None = 203
    tolerance: float = 1e-12
    library: str | None = None


def model_of_others(name, tolerance=1e-9, library=None, test_samples=13):
    return Program("others_models", f"--model {name} --float64", test_samples, tolerance, library)


MNIST = "--float64 --dataset SMALL_MNIST --batch_size 143 --log_every 1"  # of 1003 images
POINTS = "--float64 --log_every 1 --batch_size 33"  # of 200
TEXT = "--vocabulary 257 --context 8 --dim 16 --layers 1 --heads 2 --max_steps 5 --dataset SHORT_TEXT"
PROGRAMS = {
    "mnist_mlp": Program("mnist_mlp", MNIST),
    "mlp": Program("mlp", f"{MNIST} --dropout 0.1 --dtype float64"),
    "accumulation": Program("gradient_accumulation", MNIST),
    "accumulation, weights": Program("gradient_accumulation", f"{MNIST} --variable_length"),
    "transformer": Program("transformer", f"--float64 --log_every 1 {TEXT}", 3),
    "cnn": Program("cnn", "--float64 --batch_size 31", 101),
    "regression": Program("regression", f"{POINTS} --num_epochs 2", 77),
    "text": Program("text", "--float64 --batch_size 67", 501),
    "gan": Program("gan", "--float64 --batch_size 31", 61),
    "wgan": Program("wgan", "--float64 --batch_size 31", 61),
    "two_loaders": Program("two_loaders", "--float64 --batch_size 49", 61),
    # torchmetrics computes in float32.
    "own_metrics": Program("own_metrics", POINTS, 77, 1e-6, library="torchmetrics"),
    "hub_images": Program("hub_images", f"{MNIST} --max_steps 10"),
    "loss_inside": Program("loss_inside", MNIST),
    # transformers computes this loss in float32; each step of L-BFGS doubles a difference.
    "gpt2": model_of_others("gpt2", 1e-6, "transformers"),
    "gpt2_lora": model_of_others("gpt2_lora", 1e-6, "peft"),
    "bert": model_of_others("bert", library="transformers"),
    "timm_vit": model_of_others("timm_vit", library="timm"),
    "packed_lstm": model_of_others("packed_lstm"),
    "faster_rcnn": model_of_others("faster_rcnn"),
    "vae": model_of_others("vae"),
    "lbfgs": model_of_others("lbfgs", 1e-8, test_samples=None),
    "contrastive": Program("contrastive", "--float64 --batch_size 33", 31, 1e-9),
    # The recipes of guides/your_own_model.md.
    "warmup": Program("schedules", "--recipe warmup", 77, 1e-6),
    "plateau": Program("schedules", "--recipe plateau", 77, 1e-6),
    "two_optimizers": Program("schedules", f"{POINTS} --recipe two_optimizers", 77),
    "compile": Program("schedules", "--recipe compile", 77, 1e-6),
    "fine_tune": Program("fine_tune", "--float64 --dataset TINY_MNIST --batch_size 16 --log_every 1", 23, 1e-9),
    "balanced": Program("orders", "--float64 --order balanced", 101),
    "several_per_class": Program("orders", "--float64 --order several_per_class", 101),
    "similar_length": Program("orders", "--float64 --order similar_length", 101),
    "in_windows": Program("orders", "--float64 --order in_windows", 101),
}
# 3 steps per epoch, the last one of 10 images; the checkpoints of steps 2 and 4 are within an epoch.
FINE_TUNE = ["--batch_size", 20, "--num_epochs", 2, "--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]
QUICK = ["mnist_mlp", "cnn", "packed_lstm", "two_optimizers"]  # in this process, without a launch
# Whose last step has as many samples as micro-batches, or more.
WITHOUT_STAND_INS = {"lbfgs", "warmup", "plateau", "compile", "balanced", "several_per_class", "similar_length"}
WITHOUT_STAND_INS |= {"in_windows"}


def programs(names=PROGRAMS):
    """Parametrize a test with programs, with the mark `others` where one needs a library."""
    libraries = {name: PROGRAMS[name].library for name in names}
    marks = {name: pytest.mark.others(library) if library else () for name, library in libraries.items()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@pytest.fixture(scope="session")
def data(small_mnist, tiny_mnist, tmp_path_factory) -> dict[str, str]:
    """What stands in the flags above, and the folder that it means."""
    text = tmp_path_factory.mktemp("text")
    for split, count in (("train", 18), ("test", 3)):
        (text / f"{split}.txt").write_text("abcdefg," * (count - 1) + "abcdefg")
    return {"SMALL_MNIST": str(small_mnist), "TINY_MNIST": str(tiny_mnist), "SHORT_TEXT": str(text)}


def flags_of(name: str, data: dict[str, str]) -> list[str]:
    return [data.get(flag, flag) for flag in PROGRAMS[name].flags.split()]


@pytest.fixture(scope="module")
def trained(request, runs, data):
    """By program of the chosen tests: a run on one process, and the same one resumed from step 3 on two with two
    micro-batches each."""
    tests = [item for item in request.session.items if "trained" in getattr(item, "fixturenames", ())]
    chosen = {item.callspec.params["name"] for item in tests if not item.get_closest_marker("skip")}
    found = {}
    for name in [name for name in PROGRAMS if name in chosen]:
        script, flags = PROGRAMS[name].script, [*flags_of(name, data), "--checkpoint_every", 3, "--keep_checkpoints", 0]
        # Boxes are sampled in each micro-batch, so only runs with as many of them per step have the same numbers.
        one = runs(script, *flags, "--gradient_accumulation_steps", 4 if name == "faster_rcnn" else 1)
        flags += ["--gradient_accumulation_steps", 2]
        found[name] = one, runs(script, *flags, on=("cpu_ddp",), resumes=one, at=3)
    return found


@pytest.mark.slow
@programs()
def test_a_resume_on_two_processes_and_stand_ins_change_no_number(trained, name):
    one, four = trained[name]
    largest = four.differs_from(one)
    print(f"{name}: largest relative difference {largest:.1e}")
    assert largest <= PROGRAMS[name].tolerance
    launches = [(launch["from_step"], launch["num_processes"]) for launch in run_reader.launches(four.folder)]
    assert launches == [(0, 1), (3, 2)]
    if name not in WITHOUT_STAND_INS:
        record = run_reader.record(four.folder)
        assert record["data"]["train"] % record["arguments"].get("batch_size", 7) in (1, 2, 3)
    if PROGRAMS[name].test_samples:
        for run in (one, four):
            assert run_reader.summary(run.folder)["test_samples"] == PROGRAMS[name].test_samples


@pytest.mark.slow
@programs(["warmup", "plateau", "two_optimizers"])
def test_learning_rates_follow_the_recipes(trained, name):
    first, *_, last = train_lines = lines(trained[name][1].folder, "train")
    if name == "two_optimizers":
        assert (last["body_lr"], last["head_lr"]) == (0.001, 0.01)
    elif name == "plateau":
        assert (first["lr"], last["lr"]) == (0.01, 0.0025)
    else:
        assert [line["lr"] for line in train_lines] == pytest.approx([0.01 * min(1, n / 8) for n in range(1, 21)])


def test_the_body_keeps_given_weights_until_it_is_unfrozen_and_has_a_rate_of_its_own(tiny_mnist, tmp_path):
    flags = ["--dataset", tiny_mnist, *FINE_TUNE]
    one_epoch = ["--num_epochs", 1, "--frozen_epochs", 0, "--output_dir", tmp_path / "a"]
    assert run_many.run("fine_tune", [*flags, *one_epoch]) is None
    given = run_reader.weights(tmp_path / "a")
    given["head.weight"], given["head.bias"] = torch.zeros(7, 512), torch.zeros(7)  # of other classes: left out
    safetensors.torch.save_file(given, tmp_path / "given.safetensors")
    flags += ["--weights", tmp_path / "given.safetensors"]
    assert run_many.run("fine_tune", [*flags, "--output_dir", tmp_path / "b"]) is None
    for step, is_frozen in ((2, True), (4, False)):
        _, files = run_reader.checkpoint(tmp_path / "b" / "checkpoints" / f"step_{step:08d}")
        for name, tensor in files["model.safetensors"].items():
            if name.startswith("body."):
                assert torch.equal(tensor, given[name]) == is_frozen


@pytest.mark.slow
def test_fsdp_trains_the_same_model_and_resumes_before_and_after_unfreezing(runs, tiny_mnist):
    flags, on = ["--float64", "--dataset", tiny_mnist, *FINE_TUNE], ("cpu_fsdp", "--fsdp_min_num_params", 500)
    one, two = runs("fine_tune", *flags), runs("fine_tune", *flags, on=on)
    resumed = [runs("fine_tune", *flags, on=on, resumes=two, at=step) for step in (2, 4)]
    assert two.differs_from(one) <= 1e-9
    assert [again.bits for again in resumed] == [two.bits] * 2


@programs(QUICK)
def test_stand_ins_change_no_number(name, data, tmp_path, monkeypatch):
    stand_ins, micro_batches = [], GlobalSampler.micro_batches

    def watched(sampler, *args):
        for micro_batch in micro_batches(sampler, *args):
            stand_ins.extend([0] * (micro_batch.is_stand_in and sampler.seed is not None))
            yield micro_batch

    monkeypatch.setattr(GlobalSampler, "micro_batches", watched)
    for count in (1, 4):
        flags = [*flags_of(name, data), "--gradient_accumulation_steps", count, "--output_dir", tmp_path / str(count)]
        assert run_many.run(PROGRAMS[name].script, flags) is None
        assert bool(stand_ins) == (count == 4)
    assert largest_difference(tmp_path / "1", tmp_path / "4") <= PROGRAMS[name].tolerance


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
