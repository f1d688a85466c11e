"""Every benchmark runs with the code of today, and RESULTS.md is what they measured."""

import importlib
import json
import os
import runpy
import shlex
from unittest import mock

import pytest
from conftest import ROOT
from PIL import Image

from benchmarks import common, gpus, run

FOLDER = ROOT / "benchmarks"
RESULTS = json.loads((FOLDER / "results.json").read_text())


def test_no_benchmark_is_forgotten():
    others = {"common", "run", "synthetic", "gpus"}
    assert set(run.BENCHMARKS) == {path.stem for path in FOLDER.glob("*.py")} - others


@pytest.fixture
def run_here(launcher, monkeypatch, capsys):
    """Runs a benchmark in this process, with launches as in preloaded.py; returns what it prints."""

    def launch(config, script, *flags, launch_flags=(), timeout_s=600):
        with mock.patch.dict(os.environ):
            os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)  # would take a fresh interpreter
            script = (ROOT / script).with_suffix("")
            launcher(config, *flags, script=script, launch_flags=launch_flags, timeout=timeout_s)

    def run_here(file, *flags):
        monkeypatch.setattr(common, "launch", launch)
        monkeypatch.setattr("sys.argv", [str(file), *flags])
        with mock.patch.dict(os.environ):
            runpy.run_path(str(file), run_name="__main__")
        return capsys.readouterr().out

    return run_here


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in run.BENCHMARKS if name != "elastic"])  # in test_elastic.py
def test_every_benchmark_runs_at_its_smallest(name, launcher, run_here, small_mnist, tmp_path):
    """dp_and_ddp.py as a user runs it: pytest has folders in sys.path that a user has not."""
    out, file, flags = tmp_path / "out.json", FOLDER / f"{name}.py", shlex.split(run.BENCHMARKS[name])
    module = importlib.import_module(f"benchmarks.{name}")
    if "dataset=True" in file.read_text():
        flags += ["--dataset", str(small_mnist)]
    flags += ["--json", str(out)]
    printed = launcher.python(file, *flags).stdout if name == "dp_and_ddp" else run_here(file, *flags)
    report = module.report(json.loads(out.read_text()))
    assert report
    assert "\n\n".join(report) in printed
    if hasattr(module, "draw"):
        module.draw(json.loads(out.read_text()), "this machine").savefig(tmp_path / "picture.png")


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_help_and_the_smallest_flags(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", [name, *shlex.split(run.BENCHMARKS[name])])
    module.parse_args()
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.parse_args()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out
    assert f"    python benchmarks/{name}.py" in module.__doc__


@pytest.mark.slow
def test_gpus_on_stand_ins_measures_everything_and_writes_no_file(run_here):
    before = gpus.FILE.exists() and gpus.FILE.read_text()
    printed = run_here(FOLDER / "gpus.py", "--stand_ins")
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| 1 x CPU")]
    figures = {what: float(figure.replace(",", "")) for _, what, figure, _ in rows}
    assert set(figures) == {
        *("resnet50.py, fp32", "plain loop, fp32", "transformer.py", "a step, dp.yaml", "a step, ddp.yaml"),
        *("wait for a save", "peak memory"),
    }
    assert all(figure > 0 for figure in figures.values())
    assert (gpus.FILE.exists() and gpus.FILE.read_text()) == before


def test_the_mfu_of_a_known_card_is_in_the_table():
    """A quarter of the data sheet's 989 TFLOP/s."""
    resnet = {"fp16": {"images_per_s": 9.0, "checkpoint_time_s": 0.1, "peak_memory_gib": 2.0}}
    transformer = {"tokens_per_s": 1e6, "tflops": 989 / 4}
    measured = {"resnet50": resnet, "plain loop": {"fp16": 8.0}, "transformer": transformer, "peak": 989}
    table = gpus.table({"1 x NVIDIA H100": measured})
    assert "| 1 x NVIDIA H100 | transformer.py, MFU | 25 | % |" in table
    assert "a step" not in table


def test_page_and_pictures_are_made_of_the_results():
    assert (FOLDER / "RESULTS.md").read_text() == run.render(RESULTS)
    for name, entry in RESULTS.items():
        if hasattr(run.module(name), "draw"):
            with Image.open(run.module(name).PICTURE) as picture:
                assert picture.text["Description"] == run.digest(entry), name


def test_a_new_result_stays_with_the_others_of_its_machine_alone():
    facts = {"device": "this one", "versions": "torch 2"}
    old = dict.fromkeys(["elastic", "mnist_epoch", "gone"], facts)
    assert list(run.merge(old, "resnet50", facts)) == ["mnist_epoch", "resnet50", "elastic"]
    for other in ({"device": "a faster one"}, {"versions": "torch 9"}):
        assert list(run.merge(old, "resnet50", facts | other)) == ["resnet50"]


def test_workers_take_the_flags_of_their_benchmark_and_their_own_last(monkeypatch):
    monkeypatch.setattr(common, "launch", lambda config, file, _, out, *flags: out.write_text(json.dumps(flags)))
    monkeypatch.setattr("sys.argv", ["a.py", "--rounds", "1"])
    assert common.launch_workers("cpu", "a.py", "--steps", 2) == ["--rounds", "1", "--steps", 2]


def test_ways_take_turns_in_both_orders():
    called = []
    ways = {way: lambda way=way: called.append(way) or len(called) for way in "ab"}
    assert common.take_turns(ways, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert "".join(called) == "abbaab"
