"""requirements.txt, with the extra `test` of pyproject.toml, has what the code imports, and nothing else."""

import ast
import contextlib
import re
import sys
import tomllib
from importlib import metadata

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

FOLDERS = ("utils", "tools", "scripts", "examples", "tests", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OWN = {*FOLDERS, *(path.stem for path in FILES), *(path.parent.name for path in FILES)}
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # where the name in an import is a different one


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
    """The normalised name at the start of a line of requirements.txt, or of an import."""
    name = re.match(r"[\w.-]*", DISTRIBUTIONS.get(requirement, requirement))[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    """requirements.txt, and the extra `test`, without which some tests are skipped."""
    listed = (ROOT / "requirements.txt").read_text().splitlines()
    listed += tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    return [Requirement(line) for line in listed if not line.startswith("#")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_import_is_in_requirements_or_the_standard_library(path):
    listed = {distribution(requirement.name) for requirement in requirements()}
    assert {distribution(name) for name in imported(path) - OWN} <= listed


def test_every_requirement_is_imported_or_a_tool():
    packages = set()
    for path in FILES:
        packages |= imported(path)
    # pytest-xdist and ruff are run and never imported; --log_with tensorboard needs tensorboard.
    named = {distribution(requirement.name) for requirement in requirements()}
    assert named - {distribution(name) for name in packages} <= {"pytest-xdist", "ruff", "tensorboard"}


def test_the_installed_versions_are_within_the_bounds():
    for requirement in requirements():
        assert str(requirement.specifier).startswith(">=")
        with contextlib.suppress(metadata.PackageNotFoundError):
            assert requirement.specifier.contains(metadata.version(requirement.name))
