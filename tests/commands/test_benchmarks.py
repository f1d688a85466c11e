"""Every benchmark runs with the code of today, and what is written about them is what they measured.

This file alone of the tests imports benchmarks, and no benchmark imports a test.
"""

import importlib
import json
import math
import subprocess
import time
from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from PIL import Image

from benchmarks import common, run
from benchmarks.compressors import order3

FOLDER = ROOT / "benchmarks"
# The flags that make a benchmark as small as it gets; DATA is a small MNIST, TEXT a folder of text.
SMALLEST = {
    "accelerate_share": "--rounds 1 --steps 1",
    "before": "HEAD --rounds 1 --runs 1 --steps 4 --dataset DATA --only start mnist_epoch virtual_processes files",
    "checkpoint": "--rounds 1 --sizes 32x4",
    "compressors": "--steps 2 --dataset TEXT",
    "ddp": "--rounds 1 --steps 1 --batches 256 --resnet50_batch 4 --dataset DATA",
    "elastic": "--machines 2 --events 1 --steps_between 100 --dataset DATA --picture OUT.png",
    "evaluation": "--rounds 1 --images 8 --dataset DATA",
    "gradient_accumulation": "--steps 2 --memory_steps",
    "memory": "--num_epochs 3 --dataset DATA",
    "mnist_epoch": "--rounds 1 --fast 1 --dataset DATA",
    "model_split": "--rounds 1 --microbatches 2 --steps 2 --batch_size 16",
    "resnet50": "--rounds 1 --sizes 32 --steps 4 --images 4 --photos 2",
    "startup": "--rounds 1 --num_epochs 1 --dataset DATA",
    "topologies": "--rounds 1 --num_epochs 1 --dataset DATA",
    "transformer": "--rounds 1 --steps 4 --dataset TEXT",
    "transformer_memory": "--sizes tiny --compare tiny",
    "virtual_processes": "--rounds 1 --steps 1 --numbers 2 --resnet50_batch 4 --dataset DATA",
}
RESULTS = json.loads((FOLDER / "results.json").read_text())


def test_no_benchmark_is_forgotten():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"common", "run"}
    assert set(SMALLEST) == files
    assert set(run.BENCHMARKS) == files - {"before"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_every_benchmark_runs_at_its_smallest(name, launcher, small_mnist, tmp_path):
    out = tmp_path / "out.json"
    flags = (
        SMALLEST[name]
        .replace("DATA", str(small_mnist))
        .replace("TEXT", str(ROOT / "accelerate_configs"))
        .replace("OUT", str(tmp_path / "out"))
    )
    flags = [flag.replace("\0", " ") for flag in flags.replace("\\ ", "\0").split()]
    printed = launcher.python(FOLDER / f"{name}.py", *flags, "--json", out, timeout=600).stdout
    report = importlib.import_module(f"benchmarks.{name}").report(json.loads(out.read_text()))
    assert "\n\n".join(report.tables) in printed
    assert report.tables
    for bars in report.bars:
        for value in bars.values.values():
            parts = value.values() if bars.is_stacked() else [value]
            assert all(math.isfinite(part) for part in parts)
    assert all(math.isfinite(goal.measured) for goal in report.goals)


@pytest.mark.parametrize("name", SMALLEST)
def test_help_and_the_flags_of_the_recorded_command(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, *run.BENCHMARKS.get(name, "HEAD").split()])
    module.parse_args()
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.parse_args()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    assert f"    python benchmarks/{name}.py" in module.__doc__


def test_results_are_of_one_machine_and_of_the_commands_that_run_py_runs():
    assert list(RESULTS) == [name for name in run.BENCHMARKS if name in RESULTS]
    assert len({(entry["device"], entry["versions"]) for entry in RESULTS.values()}) == 1
    assert all(entry["command"] == run.command(name) for name, entry in RESULTS.items())


def test_page_and_picture_are_made_of_the_results():
    assert (FOLDER / "RESULTS.md").read_text() == run.render(RESULTS)
    with Image.open(FOLDER / "results.png") as picture:
        assert picture.text["Description"] == run.digest(RESULTS)


@pytest.mark.parametrize(
    ("new", "kept"),
    [
        ({}, ["ddp", "memory", "elastic"]),
        ({"device": "a faster one"}, ["memory"]),
        ({"versions": "torch 9"}, ["memory"]),
    ],
)
def test_a_new_result_stays_with_the_others_of_its_machine_alone(new, kept):
    names = {"ddp": run.command("ddp"), "elastic": run.command("elastic"), "mnist_epoch": "an earlier command"}
    facts = {"device": "this one", "versions": "torch 2"}
    old = {name: {"command": command, **facts} for name, command in names.items()} | {"gone": facts}
    assert list(run.merge(old, "memory", {"command": run.command("memory"), **facts, **new})) == kept


def test_a_picture_shows_every_part_of_a_bar():
    from matplotlib.figure import Figure

    parts = {f"part {number}": 1.0 for number in range(9)}
    axes = Figure().subplots()
    run.draw_bars(axes, common.Bars("", {"one": {"part 0": 1.0}, "all": parts}))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(parts)
    assert len({patch.get_facecolor() for patch in axes.patches}) == 9


def test_missed_goal_says_so(monkeypatch):
    report = common.Report([], [], [common.Goal("speed", 2.0, 1.0), common.Goal("rate", 2.0, 1.0, at_least=True)])
    monkeypatch.setattr(run, "report", lambda name, entry: report)
    missed, met = run.goals({"ddp": {}}).splitlines()[2:]
    assert missed.endswith("| **no** |")
    assert met.endswith("| yes |")


def test_unknown_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "mnist"])
    with pytest.raises(SystemExit):
        run.parse_args()
    assert "mnist_epoch" in capsys.readouterr().err


def test_ways_take_turns_in_both_orders():
    called = []
    ways = {way: lambda way=way: called.append(way) or len(called) for way in "ab"}
    assert common.take_turns(ways, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(called) == "abbaab"


def test_a_schedule_leaves_always_one_machine():
    from benchmarks import elastic

    for seed in range(50):
        here = {0, 1, 2}
        for kind, machine in elastic.schedule(3, 12, seed):
            assert (machine in here) == (kind == "lost")
            here ^= {machine}
            assert here


def test_an_earlier_commit_is_checked_out_with_the_benchmarks_of_today(tmp_path):
    from benchmarks import before

    tree = before.check_out("HEAD", tmp_path / "before")
    assert (tree / "benchmarks" / "before.py").read_bytes() == (FOLDER / "before.py").read_bytes()
    command = ["git", "show", "HEAD:utils/launch.py"]
    expected = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    assert (tree / "utils" / "launch.py").read_bytes() == expected


def test_a_model_that_is_not_the_same_is_shown():
    from benchmarks import topologies

    run = {"processes": 1, "device": "cpu", "replicas": 1, "images": 1000, "loop_s": 2.0, "seconds": 3.0}
    rows = {"cpu": [run | {"accuracy": 0.9, "difference": 0.0}], "two": [run | {"accuracy": 0.9, "difference": 1e-3}]}
    assert not topologies.report({"epochs": 1, "runs": rows}).goals[0].is_met()
    rows.pop("two")
    assert topologies.report({"epochs": 1, "runs": rows}).goals[0].is_met()


@pytest.mark.parametrize(("gpus", "more"), [(0, []), (1, ["single_gpu"]), (2, ["single_gpu", "dp", "ddp", "fsdp"])])
def test_topologies_of_a_machine(monkeypatch, gpus, more):
    from benchmarks import topologies

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


def test_the_order3_model_is_the_one_of_witten_and_bell():
    """By hand, one byte after the other; and its probabilities of all bytes after a context add up to 1."""
    train, test = [b"abracadabra", b"abraham"], [b"abrad", b"xabr"]
    seen = b"\0\0\0abracadabra\0abraham\0"

    def probability(context, byte):
        mixed = 1 / 256
        for order in range(4):
            before = context[3 - order :]
            places = range(3, len(seen))
            after = Counter(seen[place] for place in places if seen[place - order : place] == before)
            if after:
                mixed = (after[byte] + len(after) * mixed) / (after.total() + len(after))
        return mixed

    assert sum(probability(b"abr", byte) for byte in range(256)) == pytest.approx(1)
    stream = b"\0\0\0abrad\0xabr\0"
    bits = [-math.log2(probability(stream[place - 3 : place], stream[place])) for place in range(3, len(stream))]
    assert order3(train, test) == pytest.approx(sum(bits) / 9, rel=1e-12)
