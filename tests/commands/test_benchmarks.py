"""The benchmarks run, and what is written of them is what they measured."""

import argparse
import importlib
import json
import time

import pytest
import run_many
import torch
from accelerate import Accelerator
from conftest import ROOT
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import common, run, topologies

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text())


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_help_and_the_flags_of_the_command(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, *run.BENCHMARKS[name].split()])
    module.parse_args()
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.parse_args()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    assert f"    python benchmarks/{name}.py" in module.__doc__


def test_results_are_of_the_commands_that_run_py_runs():
    assert list(RESULTS) == list(run.BENCHMARKS)
    for name, result in RESULTS.items():
        assert result["command"] == f"python benchmarks/{name}.py {run.BENCHMARKS[name]}".strip()


def test_page_and_picture_are_made_of_the_results():
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == run.render(RESULTS)
    with Image.open(ROOT / "benchmarks" / "results.png") as picture:
        assert picture.text["Description"] == run.digest(RESULTS)
        assert picture.width == 1200


def test_subset_keeps_the_others(tmp_path, monkeypatch):
    old = {"memory": RESULTS["memory"], "ddp": {"old": 1}}
    (tmp_path / "results.json").write_text(json.dumps(old))
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "measure", lambda name: RESULTS[name])
    monkeypatch.setattr("sys.argv", ["run.py", "ddp", "mnist_epoch"])
    run.main()
    merged = json.loads((tmp_path / "results.json").read_text())
    assert list(merged) == ["mnist_epoch", "ddp", "memory"]
    assert all(merged[name] == RESULTS[name] for name in merged)
    assert (tmp_path / "RESULTS.md").read_text() == run.render(merged)
    with Image.open(tmp_path / "results.png") as picture:
        assert picture.text["Description"] == run.digest(merged)


def test_missed_goal_says_so():
    slow = json.loads(json.dumps(RESULTS["mnist_epoch"]))
    slow["measured"]["script"] = [[1000.0, 0.0]]
    rows = run.goals({"mnist_epoch": slow}).splitlines()[2:]
    assert len(rows) == 3
    assert all(row.endswith("| **no** |") for row in rows)
    slow["measured"]["script"] = [[0.001, 0.0]]
    assert "**no**" not in run.goals({"mnist_epoch": slow})


def test_unknown_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "mnist"])
    with pytest.raises(SystemExit):
        run.parse_args()
    assert "there is no benchmark mnist; there are mnist_epoch, " in capsys.readouterr().err


def test_ways_take_turns_in_both_orders():
    called = []
    ways = {way: lambda way=way: called.append(way) or len(called) for way in "ab"}
    assert common.take_turns(ways, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(called) == "abbaab"


def test_epoch_of_each_way(small_mnist, monkeypatch):
    """A tiny one: 1003 images, of which each way must train on all."""
    import utils.datasets.images_in_memory
    from benchmarks import mnist_epoch
    from scripts import mnist_mlp

    monkeypatch.setattr(utils.datasets.images_in_memory, "BUNDLED_MNIST", str(small_mnist))
    monkeypatch.setattr(mnist_epoch, "BUNDLED_MNIST", str(small_mnist))
    monkeypatch.setattr(mnist_epoch, "FLAGS", f"{mnist_epoch.FLAGS} --dataset {small_mnist}")
    # run_script replaces it for good.
    monkeypatch.setattr(mnist_mlp, "load_images", mnist_mlp.load_images)
    steps, threads = [], torch.get_num_threads()
    mnist_epoch.normalised.cache_clear()

    hook = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    try:
        measured = mnist_epoch.measure(argparse.Namespace(rounds=1, fast=1))
    finally:
        hook.remove()
        torch.set_num_threads(threads)
        mnist_epoch.normalised.cache_clear()
    assert len(steps) == 16 * 6  # a warm-up and five ways
    assert [len(seconds) for seconds in measured.values()] == [1] * 5
    report = mnist_epoch.report(measured)
    assert len(report.tables[0].splitlines()) == 2 + 6
    seconds, checkpoint = measured["script"][0]
    assert 0 < checkpoint < seconds
    assert report.goals[0].measured == seconds / measured["bare loop"][0]


@pytest.fixture
def launched(monkeypatch):
    """The configs that benchmarks launch, with their flags; the script runs in this process, with
    another learning rate under cpu_ddp.yaml."""
    found = []

    def launch(config, script, *flags, launch_flags=()):
        found.append((config, *launch_flags))
        assert script == ROOT / "scripts" / "mnist_mlp.py"
        rate = [] if config == "cpu" else ["--lr", 1e-4]
        assert run_many.run("mnist_mlp", [*flags, "--hidden", 16, *rate]) is None

    monkeypatch.setattr(common, "launch", launch)
    return found


def test_topologies_take_turns_and_a_model_that_is_not_the_same_is_shown(launched, small_mnist):
    args = argparse.Namespace(rounds=2, num_epochs=1, dataset=str(small_mnist))
    measured = json.loads(json.dumps(topologies.measure(args)))
    two, four = (("cpu_ddp", "--num_processes", processes) for processes in (2, 4))
    ways = [("cpu",), two, four]
    if not torch.accelerator.is_available():
        assert launched == [*ways, *ways[::-1]]
    report = topologies.report(measured)
    _, _, *rows = report.tables[0].splitlines()
    assert len(rows) == len(launched) / 2
    assert rows[0].endswith("| 0.0e+00 |")
    assert not any(row.endswith("| 0.0e+00 |") for row in rows[1:])
    assert report.goals[0].measured > 1e-3
    assert not report.goals[0].is_met()
    runs = measured["runs"]["cpu"]
    for each in runs:
        assert each["images"] == 1003
        assert 0 < each["loop_s"] < each["seconds"]
    epoch = sum(each["loop_s"] for each in runs) / 2
    assert f" {1003 / epoch:,.0f} | {epoch:.2f} |" in rows[0]
    measured["runs"] = {"cpu": runs}
    assert topologies.report(measured).goals[0].is_met()


@pytest.mark.parametrize(("gpus", "more"), [(0, []), (1, ["single_gpu"]), (2, ["single_gpu", "dp", "ddp", "fsdp"])])
def test_topologies_of_a_machine(monkeypatch, gpus, more):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    assert list(topologies.ways()) == ["cpu", "cpu_ddp x 2", "cpu_ddp x 4", *more]


def test_time_inside_a_wrapper_is_not_its_own():
    from benchmarks.accelerate_share import PARTS, alternate

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.05)
            return super().step(closure)

    def compute_losses(model, inputs, labels):
        return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 3)
    backward = accelerator.backward
    accelerator.backward = lambda loss: time.sleep(0.05) or backward(loss)
    optimizer = Slow(model.parameters(), 0.1)
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    before = model.weight.detach().clone()
    batch = torch.randn(8, 4), torch.arange(8) % 3
    seconds = alternate(accelerator, compute_losses, *prepared, batch, steps=2, rounds=1)
    assert not torch.equal(model.weight, before)
    assert min(seconds["backward"]) >= 0.05 > max(seconds["optimizer.step"]) > 0
    assert all(len(seconds[part]) == 2 for part in PARTS)
    assert min(seconds["step"]) >= 0.1
    assert min(seconds["bare step"]) >= 0.05
    assert len(seconds["step"]) == len(seconds["bare step"]) == 2


@pytest.mark.slow
def test_startup_and_memory_as_commands(launcher, tmp_path):
    flags = {
        "startup": ["--rounds", "1", "--flags=--max_steps 3 --hidden 16", "--before", "HEAD"],
        "memory": ["--num_epochs", "3", "--flags=--batch_size 30000 --hidden 16"],
    }
    for name, words in flags.items():
        words = [ROOT / "benchmarks" / f"{name}.py", *words, "--json", tmp_path / name]
        launcher.python(*words, timeout=300)
    from benchmarks.startup import PHASES

    ours, before, plain = json.loads((tmp_path / "startup").read_text()).values()
    for [phases, accuracy, used_s] in (*ours, *before):
        assert list(phases) == PHASES
        assert all(seconds >= 0 for seconds in phases.values())
        assert accuracy > 0.1
        assert used_s > 0
    others = ("Accelerator", "model, summary, curves")
    assert list(plain[0][0]) == [phase for phase in PHASES if phase not in others]
    assert plain[0][1] > 0.97
