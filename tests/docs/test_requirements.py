"""The requirements files have what the code imports, and nothing else."""

import ast
import functools
import re
import sys

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

FOLDERS = ("utils", "tools", "scripts", "examples", "tests", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OWN = {"prove_training", *FOLDERS, *(path.stem for path in FILES), *(path.parent.name for path in FILES)}
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # where the name in an import is a different one
BROUGHT = {"filelock", "packaging", "pandas", "pillow", "psutil", "pyarrow", "pyyaml"}  # by those in requirements.txt
# pytest-xdist, ruff and ipykernel are run and never imported; --log_with tensorboard needs tensorboard.
PROGRAMS = {"pytest-xdist", "ruff", "tensorboard", "ipykernel"}


@functools.cache
def imported(path) -> set[str]:
    """Top-level names of all packages that a file imports, without the standard library."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


def distribution(requirement: str) -> str:
    """The normalised name at the start of a requirement, or of an import."""
    name = re.match(r"[\w.-]*", DISTRIBUTIONS.get(requirement, requirement))[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def listed(*files: str) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for file in files for line in (ROOT / file).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-r")]


def of_runs() -> list[Requirement]:
    return listed("requirements.txt", "scripts/requirements.txt")


def of_tests() -> list[Requirement]:
    return [*of_runs(), *listed("tests/requirements.txt", "tests/others.txt")]


@pytest.mark.parametrize("folders", [("utils", "scripts"), FOLDERS], ids=["runs", "all"])
def test_every_import_is_in_requirements_or_the_standard_library(folders):
    named = of_runs() if folders != FOLDERS else of_tests()
    available = BROUGHT | {distribution(requirement.name) for requirement in named}
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in folders:
            assert {distribution(name) for name in imported(path) - OWN} <= available, path


def test_the_program_in_plain_accelerate_is_short_and_imports_nothing_of_this_project():
    """tests/seam/ proves it."""
    program = ROOT / "examples" / "plain_accelerate.py"
    assert len(program.read_text().splitlines()) <= 70
    assert imported(program) == {"torch", "torchvision", "accelerate", "datasets"}


def test_every_requirement_is_imported_or_a_program():
    packages = set().union(*map(imported, FILES))
    named = {distribution(requirement.name) for requirement in of_tests()}
    assert named - {distribution(name) for name in packages} <= PROGRAMS


def test_the_file_that_a_copy_takes_along_is_short_and_accepts_prereleases_of_torch():
    assert len((ROOT / "requirements.txt").read_text().splitlines()) <= 10
    bounds = {requirement.name: requirement.specifier for requirement in of_runs()}
    assert bounds["torch"].contains("2.10.0a0+b558c986e8.nv25.11", prereleases=True)
    assert bounds["torch"].contains("2.15.0+cpu")


def test_ci_installs_the_oldest_versions_of_all_bounds():
    assert "install setuptools -c tests/oldest.txt" in (ROOT / ".ci" / "run").read_text()
    pins = {requirement.name: requirement.specifier for requirement in listed("tests/oldest.txt")}
    for requirement in listed("requirements.txt", "scripts/requirements.txt", "tests/requirements.txt"):
        (bound,) = requirement.specifier
        assert pins[requirement.name].contains(bound.version.removesuffix("a0")), requirement
