"""Expectations are computed from the sources: they hold for future scripts and modules too."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_many
import run_reader
from conftest import ROOT

from utils import take

SCRIPTS = {path.stem: path.relative_to(ROOT) for path in sorted((ROOT / "scripts").rglob("*.py"))}


def command(*words, **options) -> subprocess.CompletedProcess:
    """Without site-packages and with the Python that runs the tests: nothing need be installed."""
    words = [sys.executable, "-S", "-m", "utils.take", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60, **options}
    return subprocess.run(words, cwd=ROOT, **options)


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def run(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["take", *map(str, words)])
    take.main()


@pytest.fixture
def refused(monkeypatch, capsys):
    """`refused(*words)`: the sentence with which the command stops."""

    def refused(*words) -> str:
        with pytest.raises(SystemExit) as stopped:
            run(monkeypatch, *words)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said

    return refused


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A copy of mnist_mlp.py as a user takes it, without options that it does not import."""
    folder = tmp_path_factory.mktemp("taken") / "mine"
    done = command("mnist_mlp", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", [*SCRIPTS, *take.COMMANDS])
def test_copies_are_the_files_byte_for_byte_and_import_what_is_there(tmp_path, monkeypatch, name):
    run(monkeypatch, name, tmp_path)
    copied = files_in(tmp_path)
    for path in copied:
        assert path == Path("requirements.txt") or (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()
    assert SCRIPTS.get(name, Path("utils", name, "__main__.py")) in copied
    configs = {Path("accelerate_configs") / path for path in files_in(ROOT / "accelerate_configs")}
    assert {Path("LICENSE"), Path("requirements.txt"), *configs} <= {*copied}
    for path in tmp_path.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.level or node.module.partition(".")[0] == "utils"):
                folder = path.parents[node.level - 1] if node.level else tmp_path
                module = folder.joinpath(*(node.module or "").split("."))
                assert module.is_dir() or module.with_suffix(".py").is_file(), (path, node.module)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert {*lines} <= {*(ROOT / "requirements.txt").read_text().splitlines()}
    assert not any(line.startswith("pytest") for line in lines)
    assert name in take.COMMANDS or any(line.startswith("torch~") for line in lines)


def test_the_core_comes_along_and_the_commands_do_not(bare):
    copied = files_in(bare / "utils")
    assert {path.relative_to(take.UTILS) for path in take.CORE} <= {*copied}
    assert not [path for path in copied if path.parts[0] in take.COMMANDS]
    assert not {"features/pipeline.py", "features/batch_norm.py", "datasets/image_files.py"} & {*map(str, copied)}


def test_no_core_module_names_an_option_in_an_import():
    finder = take.Finder([str(ROOT)])
    for path in take.CORE:
        finder.import_hook(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert not {*take.OPTIONS.values()} & {*finder.files(), *(path.parent for path in finder.files())}


@pytest.mark.slow
def test_a_copy_without_options_trains_and_resumes_without_the_project(bare, launcher, monkeypatch, small_mnist):
    """No options: no curves, no --profile."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script, config = bare / SCRIPTS["mnist_mlp"], bare / "accelerate_configs" / "cpu.yaml"
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, script, "--dataset", small_mnist]
    launch += ["--max_steps", 4, "--checkpoint_every", 2, "--keep_checkpoints", 0, "--output_dir"]
    launcher.python(*launch, bare / "run", cwd=bare, fresh_interpreter=True)
    run_many.back_to(bare / "run", 2, bare / "resumed")
    launcher.python(*launch, bare / "resumed", "--resume", cwd=bare, fresh_interpreter=True)
    for name in ("run", "resumed"):
        assert run_reader.summary(bare / name)["step"] == 4
    assert (bare / "resumed" / "model.safetensors").read_bytes() == (bare / "run" / "model.safetensors").read_bytes()
    code = (
        f"import sys; sys.path.insert(0, {str(script.parent)!r}); import mnist_mlp; "
        "paths = [m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]; "
        f"assert not [p for p in paths if p.startswith({str(ROOT / 'utils')!r})]; mnist_mlp.parse_args()"
    )
    said = launcher.python("-c", code, "--help", cwd=bare, fresh_interpreter=True).stdout
    assert not (bare / "run" / "curves.png").exists()
    assert "--resume" in said
    assert "--profile" not in said


def test_more_is_added_by_name_and_the_rest_is_listed(tmp_path, monkeypatch, capsys, refused):
    run(monkeypatch, "mnist_mlp", tmp_path / "some", "--with", "profiling,pipeline,prove", "--with_data")
    said = capsys.readouterr().out
    for path in ("features/profiling.py", "features/pipeline.py", "prove/__main__.py", "prove/CAUSES.md"):
        assert (tmp_path / "some" / "utils" / path).is_file()
    (left_out,) = [line for line in said.splitlines() if line.startswith("left out")]
    names = left_out.replace(",", " ").split()
    assert {"doctor", "batch_norm", "image_files"} <= {*names}
    assert not {"profiling", "pipeline", "prove", "images_in_memory"} & {*names}
    assert "python -m utils.prove" in said
    assert f"--config_file accelerate_configs/cpu.yaml {SCRIPTS['mnist_mlp']}\n" in said
    for path in (ROOT / "data" / "mnist").iterdir():
        assert (tmp_path / "some" / "data" / "mnist" / path.name).read_bytes() == path.read_bytes()
    run(monkeypatch, "mnist_mlp", "doctor", tmp_path / "every", "--with", "all")
    ours = {path for path in files_in(ROOT / "utils") if path.suffix != ".pyc"}
    assert {*files_in(tmp_path / "every" / "utils")} == ours - {Path("features/README.md")}
    assert "curve does not exist" in refused("mnist_mlp", tmp_path / "new", "--with", "curve")


def test_a_script_from_elsewhere_lies_beside_utils_with_the_modules_beside_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("import models.cnn, data.folder_without_init\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("from . import rnn\n")
    (tmp_path / "models" / "rnn.py").write_text("")
    (tmp_path / "models" / "cnn.py").write_text("")
    mine = "# -*- coding: latin-1 -*-\nimport sys; sys.path.insert(0, 'ä')\nimport timm\n\n"
    mine += "def main():\n    import beside\n    from utils.features import pipeline\n"
    (tmp_path / "mine.py").write_bytes(mine.encode("latin-1"))
    new = tmp_path / "new"
    run(monkeypatch, tmp_path / "mine.py", new)
    for name in ("mine.py", "beside.py", "models/__init__.py", "models/rnn.py", "models/cnn.py"):
        assert (new / name).read_bytes() == (tmp_path / name).read_bytes()
    assert (new / "utils" / "features" / "pipeline.py").is_file()
    assert (new / "utils" / "run.py").is_file()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mine.py changes sys.path")]
    (unknown,) = [line for line in lines if "requirements.txt: " in line]
    assert unknown.rpartition(": ")[2] == "data, timm"


def test_a_script_that_uses_nothing_of_ours_brings_no_package(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text("import torch\n")
    run(monkeypatch, tmp_path / "plain.py", tmp_path / "new")
    assert not (tmp_path / "new" / "utils").exists()


def test_the_package_by_another_name(tmp_path, monkeypatch, refused):
    run(monkeypatch, "mnist_mlp", "prove", tmp_path / "new", "--package", "trainer")
    ours, copy = (folder / SCRIPTS["mnist_mlp"] for folder in (ROOT, tmp_path / "new"))
    assert copy.read_text() == ours.read_text().replace("\nfrom utils", "\nfrom trainer")
    for path in files_in(tmp_path / "new" / "trainer"):
        assert (tmp_path / "new" / "trainer" / path).read_bytes() == (ROOT / "utils" / path).read_bytes()
    assert not (tmp_path / "new" / "utils").exists()
    for name in ("no-name", "class", "json", "torch", "accelerate_configs"):
        assert "--package" in refused("mnist_mlp", tmp_path / "refused", "--package", name)
    for line in ("import utils.console", "import os, utils.console as c", "x = 1; from utils import run"):
        (tmp_path / "mine.py").write_text(line + "\n")
        assert "--package" in refused(tmp_path / "mine.py", tmp_path / "refused", "--package", "trainer")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def (", "cannot be read as Python"),
        ("from utils.no_such_module import x", "no_such_module"),
        ("from utils import no_such_module", "no_such_module"),
        ("import utils\nfrom utils import *", "import *"),
        ("import importlib, utils\nimportlib.import_module('utils.' + name)", "import_module"),
    ],
)
def test_a_script_whose_modules_cannot_be_known_is_refused(tmp_path, refused, text, reason):
    (tmp_path / "mine.py").write_text(text + "\n")
    assert reason in refused(tmp_path / "mine.py", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_script_that_does_not_exist_is_refused(tmp_path, refused):
    said = refused("no_such_script", tmp_path / "new")
    assert [name for name in (*SCRIPTS, *take.COMMANDS) if name not in said] == []
    assert "does not exist" in refused(tmp_path / "x.py", tmp_path / "new")
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "mine.py", tmp_path / "a" / "mine.py"):
        path.write_text("")
    assert "would both be mine.py" in refused(path, tmp_path / "mine.py", tmp_path / "new")


@pytest.mark.parametrize(
    "name",
    [
        SCRIPTS["mnist_mlp"],
        "LICENSE",
        "requirements.txt",
        "accelerate_configs/slurm/one_node.sbatch",
        "utils/__init__.py",
        "utils/console.py/mine",  # a folder by the name of a file
        "utils",  # a file by the name of a folder
    ],
)
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path, refused, name):
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert "nothing is overwritten" in refused("mnist_mlp", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert mine.read_text() == "mine"


def test_links_and_files_in_the_place_of_the_folder_stay_as_they_are(tmp_path, refused, monkeypatch):
    (tmp_path / "LICENSE").symlink_to(tmp_path / "elsewhere")
    assert "LICENSE exists" in refused("mnist_mlp", tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").write_text("")
    assert "file exists" in refused("mnist_mlp", tmp_path / "file")
    assert "cannot be written" in refused("mnist_mlp", tmp_path / "file" / "deeper")
    (tmp_path / "new" / "utils").mkdir(parents=True)
    (tmp_path / "new" / "utils" / "mine.py").write_text("mine")
    run(monkeypatch, "mnist_mlp", tmp_path / "new")
    assert (tmp_path / "new" / "utils" / "mine.py").read_text() == "mine"


def test_a_closed_pipe_ends_it_without_a_traceback(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = command("mnist_mlp", tmp_path / "new", stdout=write)
    os.close(write)
    assert done.stderr == ""
    assert (tmp_path / "new" / SCRIPTS["mnist_mlp"]).is_file()
