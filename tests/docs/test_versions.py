"""The versions that pages call tested are those with which .ci/run passed: it writes them to tests/versions.json."""

import json
import re

import pytest
from conftest import CONFIGS, ROOT
from pages import README, guide

from tools import doctor

CI = json.loads((ROOT / "tests" / "versions.json").read_text())


def minor(package: str, *environments: str) -> list[str]:
    """The version of a package in these environments of CI, such as 2.14."""
    return [re.match(r"\d+\.\d+", CI[environment][package])[0] for environment in environments]


def test_the_readme_and_the_doctor_name_the_oldest_and_the_newest_versions():
    torch, accelerate = (minor(package, "oldest", "newest") for package in ("torch", "accelerate"))
    line = " ".join(README.split())
    assert f"torch {' and '.join(torch)}, and Accelerate {' and '.join(accelerate)}." in line
    assert list(doctor.TESTED) == torch


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_header_of_a_config_names_the_newest_versions(path):
    header = " ".join(path.read_text().replace("\n#", "").split())
    assert re.findall(r"PyTorch (\d+\.\d+)", header) in ([], minor("torch", "newest"))
    assert re.findall(r"Accelerate (\d+\.\d+)", header) == minor("accelerate", "newest")


def test_the_page_about_posts_has_the_errors_of_the_newest_version():
    assert re.findall(r"PyTorch (\d+\.\d+)", guide("you_come_with_this_code")) == minor("torch", "newest")
