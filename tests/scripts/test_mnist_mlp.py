"""The first script, launched as a user does."""

import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from plain_loop import assert_same_as_plain, batches_of
from run_reader import lines

from scripts import mnist_mlp
from tests.programs import mlp
from utils.data.images import load_images
from utils.randomness import combine, random_uniform

PLAIN = {"seed": 0, "lr": 6e-3, "weight_decay": 0.1, "optimizer": "adamw", "dropout": 0}
RECIPES = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "other": {"seed": 5, "lr": 0.02, "weight_decay": 0.3, "dropout": 0.25},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.05, "activation": "relu"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_loop_trains_as_a_plain_one(train, small_mnist, tmp_path, monkeypatch, recipe):
    """Weights and learning rates of a PyTorch loop on whole batches, in float64; programs/mlp.py has the same loop."""
    values = {**PLAIN, **RECIPES[recipe]}
    flags = [word for name, value in values.items() for word in (f"--{name}", value)]
    modes = set()
    losses_and_hits = mlp.losses_and_hits

    def watched(model, *rest):
        modes.add((model.training, torch.is_grad_enabled()))
        return losses_and_hits(model, *rest)

    monkeypatch.setattr(mlp, "losses_and_hits", watched)
    assert train("run", "--dtype", "float64", "--log_every", 1, *flags) is None
    assert modes == {(True, True), (False, False)}

    data, test = load_images(str(small_mnist))
    torch.manual_seed(values["seed"])
    model = mnist_mlp.MLP(784, 16, 10).double()
    activation = getattr(torch.nn.functional, values.get("activation", "silu"))
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[values["optimizer"]]
    optimizer = kind(model.parameters(), values["lr"], weight_decay=values["weight_decay"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, values["lr"], 8, cycle_momentum=False)

    def logits(images, kept=1.0):
        pixels = ((images.flatten(1) - mnist_mlp.MEAN) / mnist_mlp.STD).double()
        return model.fc2(activation(model.fc1(pixels)) * kept)

    def losses():
        for epoch, indices in batches_of(len(data), 300, values["seed"], epochs=2):
            key = combine(combine(values["seed"], epoch, 3), 0)
            # A kept unit counts for the ones that were left out.
            kept = (random_uniform(key, indices, (16,)) >= values["dropout"]).double() / (1 - values["dropout"])
            images, labels = data[indices]
            yield torch.nn.functional.cross_entropy(logits(images, kept), labels)

    assert_same_as_plain(tmp_path / "run", model, losses(), optimizer, scheduler)
    loss = torch.nn.functional.cross_entropy(logits(test.tensors[0]), test.tensors[1])
    assert lines(tmp_path / "run", "test")[-1]["loss"] == pytest.approx(loss.item(), rel=1e-10)


def test_the_program_that_tests_use_has_its_numbers(small_mnist, tmp_path, home):
    flags = ["--dataset", small_mnist, "--max_steps", 5, "--gradient_accumulation_steps", 2, "--log_every", 1]
    for script in ("mnist_mlp", "mlp"):
        assert run_many.run(script, [*flags, "--output_dir", tmp_path / script]) is None
    ours, theirs = tmp_path / "mnist_mlp", tmp_path / "mlp"
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    names = ("split", "step", "loss", "accuracy", "lr")
    each = [[[line.get(name) for name in names] for line in lines(folder)] for folder in (ours, theirs)]
    assert each[0] == each[1]


@pytest.mark.slow
def test_tensorboard_writes_into_the_folder_of_the_run(train, tmp_path):
    assert train("run", "--max_steps", 4, "--log_with", "tensorboard") is None
    events = (tmp_path / "run").rglob("events.out.tfevents.*")
    assert any(b"train/loss" in file.read_bytes() for file in events)


@pytest.mark.slow
def test_the_default_run_reaches_98_percent(launcher):
    launcher("cpu_ddp", "--output_dir", "run", timeout=300)
    run = launcher.folder / "run"
    assert run_reader.summary(run)["test_accuracy"] >= 0.98
    assert {path.name for path in run.iterdir()} >= {"run.json", "metrics.jsonl", "summary.json", "model.safetensors"}


@pytest.mark.slow
def test_a_run_imports_nothing_that_it_does_not_need(launcher, small_mnist, monkeypatch):
    """Each library takes from 0.1 to 2 s; the two modules are for other data."""
    others = {"torchvision", "scipy", "sklearn", "transformers", "tensorboard", "IPython"}
    others |= {"matplotlib", "torch._inductor.compile_fx", "torch.distributed.pipelining"}
    others |= {"torch.distributed.checkpoint", "torch.utils.tensorboard"}
    others |= {"utils.items", "utils.data.image_files"}
    code = "import gc, sys\nfrom scripts import mnist_mlp\nmnist_mlp.main()\n"
    code += f"print('imported', sorted({others} & set(sys.modules)))\n"
    code += "print('frozen', gc.get_freeze_count() > 100_000)"
    run = launcher.folder / "run"
    flags = ["--dataset", small_mnist, "--output_dir", run, "--max_steps", 2]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    done = launcher.python("-c", code, *flags, cwd=ROOT)
    assert done.stdout.endswith("imported []\nfrozen True\n"), done.stdout + done.stderr
    assert done.stderr == ""  # nor does anything complain when the process ends


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_ddp", "cpu_fsdp"])
def test_virtual_processes_use_nothing_that_torch_warns_of(launcher, small_mnist, config):
    flags = ["--dataset", small_mnist, "--max_steps", 2, "--virtual_processes", 4, "--output_dir", "run"]
    assert "Warning: " not in launcher(config, *flags).stderr
