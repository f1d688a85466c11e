"""How prove_training finds a script, and imports what it imports once for all processes."""

import ast
import os
import sys
from pathlib import Path

import pytest
from torch.nn import functional as F

from prove_training import command, imports, sandbox

INSTALLED = """
import inspect, sys
from prove_training import recording
from prove_training.recording import where
from prove_training.records import Plan

recording.Recording(Plan(77, folder="/", output=sys.argv[1], without_gpu=True), 0).install()
for original, function in where.wrapped:
    try:
        parameters = inspect.signature(original).parameters.values()
    except ValueError:  # of a function that is not written in Python
        continue
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in [name for name in names if name != "self"]:
        inspect.signature(function).bind_partial(original, **{name: None})
print(len(where.wrapped), "take what the originals take")
"""


def run_forked(folder: Path, code: str, word: str) -> str:
    """Run code in a process that is forked from this one, as prove forks those of a script. Returns its output."""
    imports.load_common(Path(__file__), folder)  # as before prove forks

    def run() -> int:
        leave = os._exit  # before it is wrapped
        sys.stdout = sys.stderr = open(folder / "output.txt", "w")  # noqa: SIM115  until the end
        os.chdir(folder)
        os.environ.update(LOCAL_WORLD_SIZE="1", RANK="0", WORLD_SIZE="1")
        sys.argv[1:] = [word]
        try:
            exec(compile(code, "<code>", "exec"), {})
        finally:
            os._exit = leave
        return 0

    os.waitpid(sandbox.forked(run), 0)
    return (folder / "output.txt").read_text()


def test_what_is_called_in_place_of_a_function_takes_all_its_arguments_by_name(tmp_path):
    said = run_forked(tmp_path, INSTALLED, str(tmp_path))
    assert said.endswith("take what the originals take\n"), said


CALLS = """
import io, os, sys, torch
from prove_training.recording import Recording
from prove_training.records import Plan

open("losses.py", "w").write('''
def main():
    weight = torch.nn.Parameter(torch.ones(2))
    loss = torch.nn.functional.mse_loss(weight, torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    scaler.step(torch.optim.SGD([weight], 1.0))
    torch.save([loss], "file.pt")
    torch.save([loss], io.BytesIO())
    print(torch.cuda.is_available())
''')
recording = Recording(Plan(77, folder=os.getcwd(), output=".", without_gpu=sys.argv[1] == "pretended"), 0)
recording.install()
exec(compile(open("losses.py").read(), os.path.abspath("losses.py"), "exec"))
with recording.processes.calling("all_reduce"), recording.processes.calling("gather"):
    pass
saved = dict(recording.step.collectives)
main()
losses = [loss for step in [*recording.steps, recording.step] for micro in step.micro_batches for loss in micro.losses]
scaled = [name for step in [*recording.steps, recording.step] for name in step.scaler]
print([save.path for save in recording.saves], losses, scaled, list(saved), recording.facts.asks)
"""


@pytest.mark.parametrize("pretended", [True, False])
def test_calls_are_recorded_once_and_only_scripts_are_told_of_a_pretended_gpu(tmp_path, pretended):
    said = run_forked(tmp_path, CALLS, "pretended" if pretended else "real")
    expected = f"['file.pt', '?'] [(1.0, 2, 'losses.py:4')] ['step', 'unscale_'] ['all_reduce'] {not pretended}"
    assert said.splitlines() == [str(pretended), expected]


ORDERS = """
import sys
from torch.utils.data import DistributedSampler
from prove_training.recording import Recording, data
from prove_training.records import Plan

order = [[2, 0, 1, 4, 3]]
batches = Recording(Plan(77, folder="/", output=sys.argv[1], processes=2, orders={"train.py:5": order}), 0).batches
data.install_samplers(batches)
for shuffle in (True, False):
    for rank in range(2):
        sampler = DistributedSampler(range(5), 2, rank, shuffle)
        sampler.prove_key = "train.py:5"
        print(list(sampler))
"""


def test_a_sampler_has_the_share_of_its_process_in_the_order_of_the_reference(tmp_path):
    shares = [[2, 1, 3], [0, 4, 2], [0, 2, 4], [1, 3, 0]]
    assert run_forked(tmp_path, ORDERS, str(tmp_path)).splitlines() == [*map(str, shares)]


LIBRARIES = {
    "plain_library": "from torch.nn.functional import cross_entropy\nfrom os import path",
    "library_of_ranks": "import os\nos.environ.get('LOCAL_RANK')",
    "library_with_threads": "import threading\nthreading.Timer(1, int).start()",
    "broken_library": "1 / 0",
    "library_that_exits": "raise SystemExit",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a user, with installed libraries."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name, text in LIBRARIES.items():
        (installed / f"{name}.py").write_text(text)
    (tmp_path / "user").mkdir()
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(imports, "loaded", [])
    yield tmp_path / "user"
    for name in LIBRARIES:
        sys.modules.pop(name, None)


def test_installed_modules_are_imported_and_those_of_the_user_are_not(folder, monkeypatch):
    """Neither beside the script nor elsewhere on the path."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(elsewhere)
    (folder / "numpy.py").write_text("1 / 0")
    lines = ["from plain_library import path", "import torch.nn as t, plain_library"]
    own = [
        "import numpy",
        "import json",
        "import missing",
        "import of_the_user",
        "from . import a",
        "import torch, numpy",
    ]
    assert [imports.is_installed(ast.parse(line).body[0], folder) for line in lines + own] == [True] * 2 + [False] * 6


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_processes_cannot_share_is_noticed(folder, library):
    (folder / "train.py").write_text(f"import {library}\n")
    assert imports.load(folder / "train.py", folder) == (library == "plain_library")


def test_a_library_has_the_functions_that_it_would_have_if_it_were_imported_later(folder):
    (folder / "train.py").write_text("import plain_library\n")
    assert imports.load(folder / "train.py", folder)
    library, cross_entropy = sys.modules["plain_library"], F.cross_entropy
    imports.replace({id(cross_entropy): print, id(print): len})
    assert library.cross_entropy is len, "it is wrapped twice"
    assert F.cross_entropy is cross_entropy


def test_a_module_is_found_by_its_name_and_not_imported(folder, monkeypatch):
    package = folder / "my_package" / "training"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("1 / 0")
    for name in ("train", "__main__"):
        (package / f"{name}.py").touch()
    monkeypatch.chdir(folder)
    args = command.parse_args(["--processes", "2", "-m", "my_package.training.train", "--lr=1"])
    assert (args.module, args.script, args.flags) == ("my_package.training.train", package / "train.py", ["--lr=1"])
    assert command.module_file("my_package.training") == package / "__main__.py"
    with pytest.raises(SystemExit):
        command.parse_args(["-m", "my_package.tests"])
    assert command.parse_args([str(Path(__file__))]).module is None
