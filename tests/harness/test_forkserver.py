"""A program that was forked finds what a new interpreter has."""

import json
import signal
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_a_fork_finds_what_a_new_interpreter_does(launcher, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in (["-u", "look_around.py"], ["-m", "look_around"]):
        options = {"cwd": ROOT / "tests" / "programs", "check": False}
        ended = [
            launcher.python(*words, "a b", "parent", fresh_interpreter=fresh, **options) for fresh in (False, True)
        ]
        assert [done.stdout.splitlines()[1:] for done in ended] == [["by C"]] * 2
        forked, new = (json.loads(done.stdout.splitlines()[0]) for done in ended)
        for fork, other in ((forked.pop("child"), new.pop("child")), (forked, new)):
            # One file more: of the process that forks its children.
            assert len(fork.pop("files")) == len(other.pop("files")) + 1
            for name in other:
                assert fork[name] == other[name], name
        assert [done.returncode for done in ended] == [3, 3]
        assert [done.stderr for done in ended] == ["at the end\nby a thread\nat exit\n" * 2] * 2


def test_a_fork_ends_by_a_signal_and_an_error_as_a_new_interpreter_does(launcher):
    interrupted = launcher.start_python("-c", "import os; os.kill(os.getpid(), 2)")
    assert interrupted.wait(60) == -signal.SIGINT
    killed = launcher.start_python("-c", "import time; print(1, flush=True); time.sleep(100)")
    assert killed.stdout.readline() == "1\n"
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    failed = launcher.python("-c", "1 / 0", check=False)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    refused = launcher.python("-c", "raise SystemExit('no such file')", check=False)
    assert (refused.returncode, refused.stderr) == (1, "no such file\n")
    nobody_reads = "import os, sys; read, write = os.pipe(); os.close(read)\n"
    nobody_reads += "sys.stdout = open(write, 'w'); print()"
    unheard = launcher.python("-c", nobody_reads, check=False)
    assert unheard.returncode == 120
    assert unheard.stderr.startswith("Exception ignored in: ")


def test_what_an_import_may_read_starts_a_new_interpreter(launcher, monkeypatch):
    code = "import sys; print('torch' in sys.modules)"
    assert launcher.python("-c", code).stdout == "True\n"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp")  # torch sets it in the tests' process
    assert launcher.python("-c", code).stdout == "True\n"
    monkeypatch.setenv("TORCH_LOGS", "")
    assert launcher.python("-c", code).stdout == "False\n"


def test_hosts_are_to_be_had_from_outside_the_tests():
    """Benchmarks use them."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.elastic"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=120)
