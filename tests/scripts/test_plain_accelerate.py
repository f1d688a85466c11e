"""examples/plain_accelerate.py needs nothing of this project, and is right."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = ROOT / "examples" / "plain_accelerate.py"


def test_it_is_short_and_imports_nothing_of_this_project():
    assert len(PROGRAM.read_text().splitlines()) <= 70
    packages = re.findall(r"^(?:from|import) (\w+)", PROGRAM.read_text(), re.M)
    assert set(packages) == {"pathlib", "torch", "torchvision", "accelerate", "datasets"}


@pytest.mark.slow
def test_it_is_proven():
    words = [sys.executable, ROOT / "prove_training", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("proven: ")
