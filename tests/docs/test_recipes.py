"""The loops of guides/reference/recipes.md, as they stand there, equal a plain loop over whole batches."""

import functools
import itertools
import zlib
from types import SimpleNamespace

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT, free_port
from pages import blocks, commands, guide, section
from plain_loop import batches_of
from torch import nn

from tests.programs import recipes
from utils.randomness import combine, random_normal

LOGGED = {"normalizers": "loss", "buffer": "loss", "noise": "loss", "ratio": "dice", "updates": "loss"}


def plain_losses(recipe, model, batch, step, criterion):
    """The losses of a step, each computed when the optimizer has taken the step before; and what is logged."""
    if recipe == "buffer":
        scores, losses = recipes.centered_losses(model, criterion, batch)
        yield losses.mean(), losses.mean()
        criterion.center = 0.9 * criterion.center + 0.1 * scores.detach().mean(0)
    if recipe == "noise":
        loss = recipes.class_losses(model, batch).mean()
        yield loss, loss
        for name, parameter in model.named_parameters():
            key = combine(0, step, zlib.crc32(name.encode()))
            noise = random_normal(key, torch.arange(len(parameter)), parameter.shape[1:])
            parameter.data += 0.01 * noise.double()
    if recipe == "normalizers":
        class_losses, box_losses = recipes.detection_losses(model, batch)
        loss = class_losses.mean() + box_losses.sum() / batch.data[2].sum()
        yield loss, loss
    if recipe == "ratio":
        overlap, size = (sums.sum() for sums in recipes.overlap_and_size(model, batch))
        yield 1 - 2 * overlap / size, 2 * overlap / size
    if recipe == "updates":
        old = recipes.log_probs(model, batch).detach()
        for _ in range(4):
            ratio, gains = (recipes.log_probs(model, batch) - old).exp(), recipes.advantages(batch)
            loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            yield loss, loss


@functools.cache
def plain(recipe):
    """What is logged in each step of a recipe's plain loop, and the weights."""
    tensors, model, logged = recipes.make_data().tensors, recipes.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    criterion = recipes.Criterion()
    for step, (_, indices) in enumerate(batches_of(recipes.SAMPLES, recipes.BATCH, seed=0, epochs=2)):
        batch = SimpleNamespace(data=[tensor[indices] for tensor in tensors])
        for loss, value in plain_losses(recipe, model, batch, step, criterion):
            value = value.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logged.append(value)
    return logged, model.state_dict()


def check(run, recipe):
    logged, weights = plain(recipe)
    assert [line[LOGGED[recipe]] for line in run_reader.lines(run, "train")] == pytest.approx(logged, rel=1e-12)
    for name, tensor in run_reader.weights(run).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("recipe", LOGGED)
def test_a_recipe_equals_the_plain_loop_with_and_without_accumulation(tmp_path, float64, recipe):
    """With five micro-batches, one of them has no sample in the last step of an epoch."""
    for k in (1, 5):
        flags = ["--float64", "--recipe", recipe, "--gradient_accumulation_steps", k, "--output_dir", tmp_path / str(k)]
        assert run_many.run("recipes", flags) is None
        check(tmp_path / str(k), recipe)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_ddp", "cpu_fsdp"])
def test_a_recipe_equals_the_plain_loop_on_two_processes(runs, float64, config):
    asked = []
    for recipe, flags in itertools.product(LOGGED, ([], ["--virtual_processes", 4])):
        asked.append((runs("recipes", "--float64", "--recipe", recipe, *flags, on=(config,)), recipe))
    for run, recipe in asked:
        check(run.folder, recipe)


@pytest.mark.slow
def test_a_test_between_steps_changes_no_number_and_its_line_names_the_steps_that_are_done(tmp_path, monkeypatch):
    """With dropout. Cut at step 3, the run is tested there at the end of an epoch of its own."""
    runs = {}
    for name, k in ("one", 1), ("two", 2):
        runs[name] = tmp_path / name
        flags = ["--recipe", "tests", "--gradient_accumulation_steps", k, "--keep_checkpoints", 0]
        assert run_many.run("recipes", [*flags, "--checkpoint_every", 1, "--output_dir", runs[name]]) is None
        tests = run_reader.lines(runs[name], "test")
        assert [line["step"] for line in tests] == [3, 4, 6, 8]
        _, files = run_reader.checkpoint(runs[name] / "checkpoints" / "step_00000003")
        model = recipes.make_model().eval()
        model.load_state_dict(files["model.safetensors"])
        losses = recipes.class_losses(model, SimpleNamespace(data=recipes.make_data().tensors))
        assert tests[0]["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
        again = run_many.back_to(runs[name], 3, tmp_path / f"{name}_again")
        flags += ["--checkpoint_every", 1, "--output_dir", again, "--resume"]
        assert run_many.run("recipes", flags) is None
        assert run_reader.lines(again) == run_reader.lines(runs[name])
        assert run_reader.final_models(again) == run_reader.final_models(runs[name])
        untested = recipes.loop_of("tests").replace("run.step % 3 == 0", "False")
        monkeypatch.setattr(recipes, "loop_of", lambda _, loop=untested: loop)
        assert run_many.run("recipes", [*flags[:4], "--output_dir", tmp_path / f"{name}_untested"]) is None
        monkeypatch.undo()
        assert run_reader.final_models(tmp_path / f"{name}_untested") == run_reader.final_models(runs[name])


def test_an_exported_model_has_the_outputs_of_the_run_for_any_number_of_images(tmp_path, small_mnist, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--dataset", small_mnist, "--batch_size", 100, "--max_steps", 3, "--output_dir", "runs/mine"]
    assert run_many.run(str(ROOT / "scripts" / "mnist_mlp.py"), flags) is None
    scope = {}
    (block,) = blocks(section(guide("reference/recipes"), "Export"), "python")
    exec(block, scope)
    images = torch.randint(256, (7, 1, 28, 28), dtype=torch.uint8)
    exported = torch.export.load("runs/mine/model.pt2").module()(images)
    torch.testing.assert_close(exported, scope["model"](images))
    assert exported.std() > 0.01


def test_a_checkpoint_goes_on_in_plain_pytorch(tmp_path, float64):
    flags = ["--recipe", "normalizers", "--checkpoint_every", 1, "--keep_checkpoints", 0]
    assert run_many.run("recipes", [*flags, "--float64", "--output_dir", tmp_path / "run"]) is None
    model, tensors = recipes.make_model(), recipes.make_data().tensors
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer, folder = torch.optim.SGD(model.parameters(), 9.0), tmp_path / "run" / "checkpoints" / "step_00000007"
    (block,) = blocks(section(guide("reference/recipes"), "A checkpoint in plain PyTorch"), "python")
    exec(block, {"folder": folder, "model": model, "optimizer": optimizer})
    *_, (_, indices) = batches_of(recipes.SAMPLES, recipes.BATCH, seed=0, epochs=2)
    batch = SimpleNamespace(data=[tensor[indices] for tensor in tensors])
    next(plain_losses("normalizers", model, batch, 7, None))[0].backward()
    optimizer.step()
    for name, tensor in run_reader.weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_fsdp_under_torchrun_has_the_bits_of_the_config_file(launcher, runs, monkeypatch):
    flags, folder = ["--recipe", "normalizers", "--float64"], launcher.folder / "torchrun"
    expected = runs("recipes", *flags, on=("cpu_fsdp", "--fsdp_min_num_params", 10)).bits
    (command,) = [c for c in commands(guide("reference/several_machines")) if c.startswith("ACCELERATE_USE_FSDP")]
    for variable in command.partition(" torchrun ")[0].replace("100000", "10").split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1,-1")
    torchrun = ["-m", "torch.distributed.run", "--master_port", free_port(), "--nproc_per_node", 2]
    launcher.python(*torchrun, f"{run_many.FILE}.py", *run_many.words("recipes", [*flags, "--output_dir", folder]))
    assert run_reader.final_models(folder) == expected
    (launch,) = run_reader.launches(folder)
    assert (launch["distributed_type"], launch["num_processes"]) == ("FSDP", 2)
