"""The report of tests/distributed/test_topologies.py has a row for each check, whichever process ran it."""

import shutil

import pytest
import torch
from conftest import ROOT


def run_pytest(launcher, *flags):
    folder = launcher.folder
    words = ["-m", "pytest", "-p", "conftest", "-c", ROOT / "pyproject.toml", "--rootdir", folder]
    words += ["-p", "no:cacheprovider", "-o", "addopts=", folder, *flags]
    return launcher.python(*words, check=False, timeout=300)


@pytest.mark.slow
def test_rows_of_all_workers_arrive_in_one_file(launcher, tmp_path):
    # conftest.py goes by the name.
    shutil.copy(ROOT / "tests" / "programs" / "topology_checks.py", tmp_path / "test_topologies.py")
    done = run_pytest(launcher, "-n", 2, "--dist", "load", "--report", "own.md")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    text = (tmp_path / "own.md").read_text()
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "GPUs: " in text
    assert "3 checks: 1 passed, 1 failed, 1 skipped." in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2:5] == [
        "| cpu | numbers are the same, float32 | loss 1.0e-07 | 1.0e-05 | passed |",
        "| ddp, bf16 | numbers are the same, float32 |  |  | skipped: needs 2 GPUs, and this machine has 0 |",
        "| cpu | speed is reported | 12,346 images/s |  | **failed**: AssertionError: a \\| b |",
    ]
    assert rows[-1] == "| cpu | 1 | 1 | 12,346 | 7.9 |"
