from importlib import metadata

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from utils.take.requirements import distribution, imported, missing

FOLDERS = ("utils", "scripts", "tests", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# Of programs whose tests are skipped where they are not installed.
OPTIONAL = {"timm", "torchmetrics", "transformers", "tokenizers"}
OWN = {*FOLDERS, *(path.stem for path in FILES)}


def requirements() -> list[Requirement]:
    text = (ROOT / "requirements.txt").read_text()
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_import_is_in_requirements_or_the_standard_library(path):
    packages = imported(path) - OWN - OPTIONAL
    assert not missing(packages)


def test_every_requirement_is_imported_or_a_tool():
    packages = set()
    for path in FILES:
        packages |= imported(path)
    # pytest-xdist and ruff are run and never imported; --log_with tensorboard needs tensorboard.
    named = {distribution(requirement.name) for requirement in requirements()}
    assert named - {distribution(name) for name in packages} <= {"pytest-xdist", "ruff", "tensorboard"}


def test_the_installed_versions_are_within_the_bounds():
    for requirement in requirements():
        assert str(requirement.specifier).startswith("~=")
        assert requirement.specifier.contains(metadata.version(requirement.name))


def test_import_names_lead_to_their_distributions():
    """The table of names that differ is complete for what is installed here."""
    found = metadata.packages_distributions()
    packages = set()
    for path in FILES:
        packages |= imported(path)
    for name in packages - OWN:
        if name in found:
            distributions = {distribution(one) for one in found[name]}
            assert distribution(name) in distributions
