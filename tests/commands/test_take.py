"""Expectations are computed from the sources: they hold for future scripts and modules too."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from utils import take

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
COMMANDS = take.commands()


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """`taken(name)`: the folder into which a script was copied, as a user does it; once a name."""
    folders = {}

    def taken(name):
        if name not in folders:
            folder = tmp_path_factory.mktemp("taken") / name
            done = command(name, folder)
            assert done.returncode == 0, done.stderr
            folders[name] = folder
        return folders[name]

    return taken


def command(*words, cwd=ROOT) -> subprocess.CompletedProcess:
    """Without site-packages and with the Python that runs the tests: nothing need be installed."""
    words = [sys.executable, "-S", "-m", "utils.take", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def refused(capsys, *words) -> str:
    """The sentence with which the command stops."""
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def run(*words) -> None:
    before = sys.argv
    sys.argv = ["take", *map(str, words)]
    try:
        take.main()
    finally:
        sys.argv = before


def imports(path: Path) -> set[str]:
    """Dotted names of all modules that a file could import; relative ones begin with a dot."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            separator = "" if module.endswith(".") else "."
            names |= {f"{module}{separator}{alias.name}" for alias in node.names}
    return names


def own_modules(path: Path, package: str, modules: set[str]) -> set[str]:
    """The modules of `package` that a file imports."""
    found = set()
    imported = imports(path)
    for name in modules:
        if {f".{name}", f"{package}.{name}"} & imported:
            found.add(name)
    return found


@pytest.mark.parametrize("name", SCRIPTS + COMMANDS)
def test_every_copied_file_compiles_and_none_speaks_of_utils(taken, name):
    folder = taken(name)
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        text = path.read_text()
        compile(text, path, "exec")
        assert not {one for one in imports(path) if one.partition(".")[0] == "utils"}
        assert not re.search(r"(?<![\w.])utils\.\w|(?<!\w)utils/|sys\.path\.insert", text)
    for path in (folder / "accelerate_configs").rglob("*"):
        if path.is_file():
            assert not re.search(r"(?<![\w.])utils[./]\w|scripts/", path.read_text())


@pytest.mark.parametrize("name", SCRIPTS + COMMANDS)
def test_exactly_the_needed_modules_are_copied(taken, name):
    folder = taken(name)
    package = folder / "train_utils"
    copied = {path.stem for path in package.glob("*.py")} - {"__init__"}
    starts = [folder / f"{name}.py"] if name in SCRIPTS else [package / f"{name}.py"]
    reached = {name} if name in COMMANDS else set()
    all_modules = {path.stem for path in (ROOT / "utils").glob("*.py")} - {"__init__"}
    while starts:
        new = own_modules(starts.pop(), "train_utils", all_modules) - reached
        reached |= new
        starts += [package / f"{one}.py" for one in new if one in copied]
    assert reached == copied
    assert (package / "__init__.py").is_file() or not copied


@pytest.mark.parametrize("name", SCRIPTS + COMMANDS)
def test_all_files_of_the_folder_are_expected(taken, name):
    folder = taken(name)
    names = {path.name for path in folder.iterdir()}
    expected = {"accelerate_configs", "LICENSE", "requirements.txt", "train_utils"}
    if name in SCRIPTS:
        expected.add(f"{name}.py")
    assert names == expected
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    configs = {str(path.relative_to(folder)) for path in folder.glob("accelerate_configs/**/*.*")}
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("accelerate_configs/**/*.*")}
    assert configs == ours
    first, *rest = (folder / "train_utils" / "__init__.py").read_text().splitlines()
    assert first.startswith("# From the accelerate training scripts, MIT license")
    assert rest[0].startswith('"""')


@pytest.mark.parametrize("name", SCRIPTS + COMMANDS)
def test_requirements_are_those_of_the_copied_files(taken, name):
    folder = taken(name)
    packages = {"train_utils"}
    for path in folder.rglob("*.py"):
        packages |= {one.partition(".")[0] for one in imports(path)}
    lines = (folder / "requirements.txt").read_text().splitlines()
    ours = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(lines) <= set(ours)
    named = {take.distribution(line) for line in lines if not line.startswith("#")}
    needed = {take.distribution(one) for one in packages}
    every = {take.distribution(line) for line in ours if not line.startswith("#")}
    assert named == needed & every
    assert "torch" in named
    assert "pytest" not in named


def test_imports_that_only_the_path_needed_are_gone(taken):
    for name in SCRIPTS:
        copy = (taken(name) / f"{name}.py").read_text()
        tree = ast.parse(copy)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for word, line in (("sys", "import sys\n"), ("Path", "from pathlib import Path\n")):
            assert (line in copy) == (word in used), name
        assert "\n\n\n\n" not in copy
        assert '"""\n\n\n' not in copy.partition("def ")[0].partition("class ")[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_code_of_a_script_is_otherwise_unchanged(taken, name):
    """The syntax trees without imports and docstrings are the same."""

    def code(path):
        kept = []
        for node in ast.parse(path.read_text()).body:
            text = ast.unparse(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)) or "sys.path.insert" in text:
                continue
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue
            kept.append(text.replace("train_utils", "utils").replace(f"scripts/{name}", name))
        return kept

    assert code(taken(name) / f"{name}.py") == code(ROOT / "scripts" / f"{name}.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_commands_in_docstring_and_configs_name_the_copy(taken, name):
    folder = taken(name)
    docstring = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text()))
    assert f"scripts/{name}.py" not in docstring
    assert f" {name}.py" in docstring
    assert f"cpu.yaml {name}.py" in (folder / "accelerate_configs" / "cpu.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS + COMMANDS)
def test_the_copied_package_imports_from_the_folder_alone(taken, launcher, monkeypatch, name):
    folder = taken(name)
    modules = sorted(path.stem for path in (folder / "train_utils").glob("*.py"))
    code = "import importlib, os, sys\nsys.path.insert(0, '')\n"
    for module in modules:
        code += f"importlib.import_module('train_utils.{module}')\n"
    if name in SCRIPTS:
        code += f"import {name}\n"
    code += "paths = [m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]\n"
    # The README puts the environment into this folder.
    code += "paths = [p for p in paths if not p.startswith(sys.prefix + os.sep)]\n"
    code += f"assert not [p for p in paths if p.startswith({str(ROOT) + os.sep!r})]\n"
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launcher.python("-c", code, cwd=folder)


def test_what_is_printed_is_what_was_copied_and_the_command(tmp_path, capsys):
    name = SCRIPTS[0]
    run(name, tmp_path / "my project")
    said = capsys.readouterr().out
    assert f"accelerate launch --config_file accelerate_configs/cpu.yaml {name}.py" in said
    assert f"in '{tmp_path}/my project'" in said
    for path in (tmp_path / "my project" / "train_utils").glob("*.py"):
        assert path.stem == "__init__" or re.search(rf"\b{path.stem}\b", said)


@pytest.mark.slow
def test_the_doctor_is_taken_and_runs(taken, launcher):
    folder = taken("doctor")
    done = launcher.python("-m", "train_utils.doctor", cwd=folder, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "cpu.yaml your_script.py" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_page_that_a_module_names_comes_along(taken):
    page = taken("prove") / "train_utils" / "CAUSES.md"
    assert "`python -m train_utils.prove`" in page.read_text()
    module = (taken("prove") / "train_utils" / "prove.py").read_text()
    assert '"train_utils/prove/CAUSES.md"' in module
    assert not list((taken("doctor") / "train_utils").glob("*.md"))


def test_several_scripts_share_one_package(tmp_path):
    first, last = SCRIPTS[0], SCRIPTS[-1]
    run(first, last, "doctor", tmp_path)
    assert {f"{first}.py", f"{last}.py"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "train_utils" / "doctor.py").is_file()
    assert f"cpu.yaml {first}.py" in (tmp_path / "accelerate_configs" / "cpu.yaml").read_text()


def test_a_package_by_another_name(tmp_path):
    run(SCRIPTS[0], "doctor", tmp_path, "--package", "trainer")
    assert (tmp_path / "trainer" / "console.py").is_file()
    assert not (tmp_path / "train_utils").exists()
    assert "python -m trainer.doctor" in (tmp_path / "trainer" / "doctor.py").read_text()
    for path in tmp_path.rglob("*.py"):
        assert "train_utils" not in path.read_text()


def test_with_data_copies_mnist(tmp_path):
    run(SCRIPTS[0], tmp_path, "--with_data")
    ours = ROOT / "data" / "mnist"
    for path in ours.iterdir():
        assert (tmp_path / "data" / "mnist" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("no-name", "not a Python identifier"),
        ("1st", "not a Python identifier"),
        ("class", "not a Python identifier"),
        ("", "not a Python identifier"),
        ("json", "standard library"),
        (SCRIPTS[0], "name of the script"),
        ("torch", "a package that is imported"),
        ("accelerate_configs", "folder with the configs"),
    ],
)
def test_a_package_name_that_does_not_fit_is_refused(tmp_path, capsys, package, reason):
    said = refused(capsys, SCRIPTS[0], tmp_path / "new", "--package", package)
    assert reason in said
    assert "pass another --package" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    [
        f"{SCRIPTS[0]}.py",
        "LICENSE",
        "requirements.txt",
        "accelerate_configs/slurm/one_node.sbatch",
        "train_utils/__init__.py",
        "train_utils/console.py/mine",  # a folder by the name of a file
    ],
)
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path, capsys, name):
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    said = refused(capsys, SCRIPTS[0], tmp_path)
    assert "nothing is overwritten" in said
    assert sorted(tmp_path.rglob("*")) == before
    assert mine.read_text() == "mine"


def test_a_link_that_leads_nowhere_is_not_overwritten_either(tmp_path, capsys):
    (tmp_path / "LICENSE").symlink_to(tmp_path / "elsewhere")
    assert "already has LICENSE" in refused(capsys, SCRIPTS[0], tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "model.py").write_text("mine")
    (tmp_path / "train_utils").mkdir()
    (tmp_path / "train_utils" / "my_module.py").write_text("mine")
    run(SCRIPTS[0], tmp_path)
    assert (tmp_path / "model.py").read_text() == "mine"
    assert (tmp_path / "train_utils" / "my_module.py").read_text() == "mine"


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, SCRIPTS[0], tmp_path / "file")
    assert "is a file" in refused(capsys, SCRIPTS[0], tmp_path / "file" / "deeper")
    (tmp_path / "train_utils").write_text("")
    assert "already has train_utils" in refused(capsys, SCRIPTS[0], tmp_path)


def test_files_already_written_are_removed_if_one_cannot_be(tmp_path, capsys):
    files = {Path("a"): b"a", Path("b" * 300): b"", Path("c"): b"c"}
    with pytest.raises(SystemExit):
        take.write_files(tmp_path, files)
    assert "cannot be written: File name too long" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_script_that_does_not_exist_is_refused(tmp_path, capsys):
    said = refused(capsys, "no_such_script", tmp_path / "new")
    for name in (*SCRIPTS, "doctor"):
        assert name in said
    assert "does not exist" in refused(capsys, tmp_path / "x.py", tmp_path / "new")
    assert "does not exist" in refused(capsys, "take", tmp_path / "new")
    (tmp_path / "broken.py").write_text("def (")
    assert "cannot be read as Python" in refused(capsys, tmp_path / "broken.py", tmp_path / "new")
    (tmp_path / "bad.py").write_text("from utils.no_such_module import x\n")
    assert "no such module" in refused(capsys, tmp_path / "bad.py", tmp_path / "new")
    (tmp_path / f"{SCRIPTS[0]}.py").write_text("")
    twice = (SCRIPTS[0], tmp_path / f"{SCRIPTS[0]}.py")
    assert "the same name" in refused(capsys, *twice, tmp_path / "new")
    assert not (tmp_path / "new").exists()


OWN_SCRIPT = '''\
"""Mine: scripts/mine.py uses utils; see utils/console.py and accelerate.utils."""
import os, sys

# The collection lies elsewhere.
sys.path.insert(0, "{root}")

import timm
import utils.console
import utils.atomic_files as files, json
from torch import nn
from utils import (
    console as screen,  # é utils.console
)

sys.path.append("mine")
ümlaut = "utils"; from utils.console import show


def main():
    from utils.features.out_of_memory import largest_that_fits as fit

    import beside
    utils.console.show("utils/x utils.console")
    nn.utils.clip_grad_norm_([], 1.0)
    return f"{{utils.console.plural(2, 'é')}} data/utils/x", "my-utils.x"
'''

OWN_COPY = '''\
"""Mine: mine.py uses train_utils; see train_utils/console.py and accelerate.utils."""
import os, sys

import timm
import train_utils.console
import train_utils.files as files, json
from torch import nn
from train_utils import (
    console as screen,  # é train_utils.console
)

sys.path.append("mine")
ümlaut = "utils"; from train_utils.console import show


def main():
    from train_utils.memory import largest_that_fits as fit

    import beside
    train_utils.console.show("train_utils/x train_utils.console")
    nn.utils.clip_grad_norm_([], 1.0)
    return f"{train_utils.console.plural(2, 'é')} data/utils/x", "my-utils.x"
'''


def test_a_script_of_ones_own_in_all_ways_of_importing(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(OWN_SCRIPT.format(root=ROOT))
    (tmp_path / "beside.py").write_text("")
    run(script, tmp_path / "new")
    assert (tmp_path / "new" / "mine.py").read_text() == OWN_COPY
    copied = {path.stem for path in (tmp_path / "new" / "train_utils").glob("*.py")}
    assert {"__init__", "console", "files", "memory"} <= copied
    assert "checkpoint" not in copied
    said = capsys.readouterr().out
    assert "not copied, and imported by the script: beside\n" in said
    assert "not in requirements.txt, and imported: timm\n" in said


@pytest.mark.parametrize(
    ("line", "is_dropped"),
    [
        ("sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils", True),
        ("sys.path.append(str(Path(__file__).resolve().parent.parent))", True),
        ("sys.path.insert(0, str(Path(__file__).resolve().parents[2]))", False),
        ("sys.path.insert(0, str(Path(__file__).resolve().parents[99]))", False),
        ("sys.path.insert(0, '/somewhere/else')", False),
        ("sys.path.insert(0, folder)", False),
    ],
)
def test_only_the_path_to_our_package_is_dropped(tmp_path, monkeypatch, line, is_dropped):
    monkeypatch.setattr(take, "ROOT", tmp_path.resolve())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text(f"import sys\nfrom pathlib import Path\n\n{line}\nx = 1\n")
    source = take.Source(tmp_path / "mine" / "a.py")
    text = source.rewritten("train_utils", ["a"])
    assert ("sys.path" not in text) == is_dropped
    assert ("import sys" not in text) == is_dropped


def test_a_script_without_our_modules_is_copied_without_a_package(tmp_path):
    (tmp_path / "plain.py").write_text("import torch\n")
    run(tmp_path / "plain.py", tmp_path / "new")
    assert not (tmp_path / "new" / "train_utils").exists()
    assert (tmp_path / "new" / "plain.py").read_text() == "import torch\n"
