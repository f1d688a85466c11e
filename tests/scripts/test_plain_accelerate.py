"""examples/plain_accelerate.py needs nothing of this project; tests/seam/ proves it."""

import re

from conftest import ROOT

PROGRAM = ROOT / "examples" / "plain_accelerate.py"


def test_it_is_short_and_imports_nothing_of_this_project():
    assert len(PROGRAM.read_text().splitlines()) <= 70
    packages = re.findall(r"^(?:from|import) (\w+)", PROGRAM.read_text(), re.M)
    assert set(packages) == {"pathlib", "torch", "torchvision", "accelerate", "datasets"}
