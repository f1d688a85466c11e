"""The report of tests/distributed/test_topologies.py has a row for each check, whichever process ran it."""

import pytest
import torch
from conftest import ROOT

# A stand-in for test_topologies.py, under its name: conftest.py goes by that.
CHECKS = """
import time
from types import SimpleNamespace
import pytest

both = [SimpleNamespace(name="cpu"), SimpleNamespace(name="ddp, bf16")]

@pytest.fixture
def topology(request):
    if "bf16" in request.param.name:
        pytest.skip("needs 2 GPUs, and this machine has 0")
    return request.param

@pytest.mark.parametrize("topology", both, indirect=True)
@pytest.mark.parametrize("dtype", ["float32"])
def test_numbers_are_the_same(topology, dtype, record_property):
    record_property("figure", "loss 1.0e-07")
    record_property("tolerance", "1.0e-05")

@pytest.mark.parametrize("topology", both[:1], indirect=True)
def test_speed_is_reported(topology, record_property):
    record_property("speed", [1, 1, 12345.6, 7.89])
    record_property("figure", "12,346 images/s")
    assert 2 == 3, "a | b"

def test_of_no_topology():
    pass
"""


# The hooks of our conftest.py, for a folder elsewhere.
HOOKS = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

sys.path[:0] = [{tests!r}, {root!r}]
spec = spec_from_file_location("own", {tests!r} + "/conftest.py")
own = module_from_spec(spec)
spec.loader.exec_module(own)
globals().update({{name: hook for name, hook in vars(own).items() if name.startswith("pytest_")}})
"""


def run_pytest(launcher, *flags):
    folder = launcher.folder
    (folder / "conftest.py").write_text(HOOKS.format(tests=str(ROOT / "tests"), root=str(ROOT)))
    words = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder]
    words += ["-p", "no:cacheprovider", "-o", "addopts=", folder, *flags]
    return launcher.python(*words, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", 2, "--dist", "load"]])
def test_rows_of_all_workers_arrive_in_one_file(launcher, tmp_path, workers):
    (tmp_path / "test_topologies.py").write_text(CHECKS)
    done = run_pytest(launcher, *workers, "--report", "own.md")
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


@pytest.mark.slow
def test_without_a_topology_there_is_no_report(launcher, tmp_path):
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n")
    done = run_pytest(launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("*.md"))
