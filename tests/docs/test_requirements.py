import sys
from importlib import metadata

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from utils import take

FOLDERS = ("utils", "scripts", "tests", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OWN = {*FOLDERS, *(path.stem for path in FILES)}


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_import_is_in_requirements_or_the_standard_library(path):
    packages = take.Source(path).imported_packages() - OWN
    assert not take.missing_requirements(packages)


def test_every_requirement_is_imported_or_a_tool():
    packages = set()
    for path in FILES:
        packages |= take.Source(path).imported_packages()
    imported = {take.distribution(name) for name in packages}
    # pytest-xdist and ruff are run and never imported; --log_with tensorboard needs tensorboard.
    named = {take.distribution(requirement.name) for requirement in requirements()}
    assert named - imported <= {"pytest-xdist", "ruff", "tensorboard"}


def test_the_installed_versions_are_within_the_bounds():
    for requirement in requirements():
        assert str(requirement.specifier).startswith("~=")
        assert requirement.specifier.contains(metadata.version(requirement.name))


def test_import_names_lead_to_their_distributions():
    """The table of names that differ is complete for what is installed here."""
    found = metadata.packages_distributions()
    packages = set()
    for path in FILES:
        packages |= take.Source(path).imported_packages()
    for name in packages - OWN - set(sys.stdlib_module_names):
        if name in found:
            distributions = {take.distribution(one) for one in found[name]}
            assert take.distribution(name) in distributions
