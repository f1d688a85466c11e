"""The recipes of guides/your_own_model.md keep the promises: tests/programs/schedules.py has each of them."""

import pytest
import run_many
import run_reader
from conftest import ROOT
from run_reader import lines

RECIPES = ["warmup", "plateau", "two_optimizers", "compile"]
PROGRAM = ROOT / "tests" / "programs" / "schedules.py"


@pytest.fixture(scope="module")
def runs(shared_launcher):
    """Each recipe on one process, on 2 processes with 2 accumulation steps, and resumed from step 7 of the latter."""
    top = shared_launcher.folder
    for config, name, accumulation in (("cpu", "one", 1), ("cpu_ddp", "two", 2)):
        launches = []
        for recipe in RECIPES:
            flags = ["--recipe", recipe, "--gradient_accumulation_steps", accumulation]
            flags += ["--checkpoint_every", 7, "--keep_checkpoints", 0]
            folder = top / recipe / name
            launches.append(["--script", PROGRAM, *flags, "--output_dir", folder])
            again = top / recipe / f"{name}_resumed"
            launches.append(
                ["--script", PROGRAM, "--back_to", folder, 7, again, *flags, "--resume", "--output_dir", again]
            )
        shared_launcher(config, *run_many.words("mnist_mlp", *launches), script=run_many.FILE, timeout=300)
    return top


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_same_numbers_on_two_processes_with_accumulation(runs, recipe):
    one, two = lines(runs / recipe / "one"), lines(runs / recipe / "two")
    assert len(one) == len(two) == 24
    for line, other in zip(one, two, strict=True):
        assert other["split"] == line["split"]
        numbers = {name: value for name, value in line.items() if name != "split"}
        assert {name: other[name] for name in numbers} == pytest.approx(numbers, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", ["one", "two"])
def test_a_recipe_is_resumed_bit_by_bit(runs, recipe, run):
    whole, resumed = runs / recipe / run, runs / recipe / f"{run}_resumed"
    assert run_reader.launches(resumed)[1]["from_step"] == 7
    assert lines(resumed) == lines(whole)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_learning_rates_follow_the_recipes(runs):
    rates = [line["lr"] for line in lines(runs / "warmup" / "one", "train")]
    assert rates == pytest.approx([0.01 * min(1, step / 8) for step in range(1, 21)])
    rates = [line["lr"] for line in lines(runs / "plateau" / "one", "train")]
    assert rates[0] == 0.01
    assert rates[-1] == 0.0025
    last = lines(runs / "two_optimizers" / "two")[-2]
    assert (last["body_lr"], last["head_lr"]) == (0.001, 0.01)
