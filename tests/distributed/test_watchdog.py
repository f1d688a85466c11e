"""A rank that hangs says where it is, and no healthy run is reported; the end of a process that has succeeded."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from utils import launched
from utils.checkpoint import folder
from utils.failures import watchdog
from utils.failures.processes import end_process_group

PROGRAM = ROOT / "tests" / "programs" / "hangs.py"


def line_with(text: str) -> int:
    return PROGRAM.read_text().partition(text)[0].count("\n") + 1


def wait_for(process, pattern: str) -> None:
    text = ""
    for line in process.stdout:
        text += line
        if re.search(pattern, text):
            return
    raise AssertionError(text)


@pytest.mark.slow
def test_each_rank_says_where_it_is_in_a_step_that_does_not_end_and_a_killed_one_is_named(launcher):
    folder = launcher.folder
    process = launcher.fork("cpu_ddp", script=PROGRAM.with_suffix(""), stderr=subprocess.STDOUT)
    warning = r"warning: rank {} on \S+ has been in one micro-batch for [67] s, after step {}, at \S*hangs.py:{}; "
    waits, loops = warning.format(0, 7, line_with("# first")), warning.format(1, 7, r"\d+")
    wait_for(process, rf"(?s)({waits}.*{loops}|{loops}.*{waits})")
    (folder / "first").touch()
    wait_for(process, warning.format(1, 8, line_with("# backward")))  # rank 0 is stopped, and says nothing
    os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    lost = rf"error: rank 0 on \S+ lost another process at \S*hangs.py:{line_with('# third')}: (Connection|Read error)"
    wait_for(process, lost)
    wait_for(process, "traceback : " + lost)  # the launcher's report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(launcher, small_mnist):
    """One that frees a tensor then would abort the process, whose run was a success."""
    # The watchdog looks every 0.3 s, and keeps nothing of what it has seen.
    flags = ["--dataset", small_mnist, "--output_dir", "run", "--batch_size", 16, "--num_epochs", 10, "--timeout_s", 20]
    done = launcher("cpu_ddp", *flags, script=ROOT / "tests" / "programs" / "threads_at_exit")
    assert done.stdout.count("0 threads of gloo") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_ends_after_what_the_threads_of_gloo_still_do():
    """FSDP's modules keep these threads, which may get hardly any time on a busy machine."""
    begun, done = threading.Event(), threading.Event()

    def works():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**6)  # without the GIL, as gloo
        done.set()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    threading.Thread(target=works).start()
    begun.wait()
    end_process_group()
    assert done.is_set()


class Clock:
    """In the place of the module time: the watchdog sleeps as long as the test says, however busy the machine is."""

    def __init__(self):
        self.ticks, self.asleep = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(self, seconds):
        self.asleep.release()
        self.ticks.acquire()

    def passes(self, ticks):
        """Until the watchdog has looked that often."""
        assert all(self.ticks.release() or self.asleep.acquire(timeout=60) for _ in range(ticks))  # here


@pytest.fixture
def watched(monkeypatch, capsys):
    """An accelerator of two processes whose micro-batches are late after 20 ticks, and what has been said."""
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "newest", None)
    accelerator = SimpleNamespace(num_processes=2, process_index=1, steps_done=6, micro_batches=0)
    accelerator.said = lambda: capsys.readouterr().err.splitlines()
    accelerator.passes = clock.passes
    watchdog.watch(accelerator, timeout_s=4)
    assert clock.asleep.acquire(timeout=60)
    yield accelerator
    watchdog.newest = None
    clock.ticks.release()  # the thread ends


def test_a_micro_batch_that_does_not_end_is_reported_once_with_its_line(watched):
    watched.micro_batches = 1
    watched.passes(70)
    (line,) = watched.said()
    place = f"{Path(__file__).name}:{Path(__file__).read_text().partition('# here')[0].count(chr(10)) + 1}"
    assert re.match(rf"warning: rank 1 on \S+ has been in one micro-batch for 6 s, after step 6, at \S*{place}; ", line)
    watched.micro_batches = 2
    watched.passes(70)
    assert len(watched.said()) == 1  # of the second one


def test_steps_of_many_micro_batches_are_all_right(watched):
    for number in range(1, 10):
        watched.micro_batches = number
        watched.passes(20)
    assert watched.said() == []


def test_a_thread_that_goes_on_is_not_looked_at(watched, monkeypatch):
    """Python 3.11 may end, or hang, while one thread reads the stack of another that runs."""
    looks = []
    monkeypatch.setattr(watchdog.traceback, "extract_stack", lambda frame: looks.append(frame) or [])
    for number in range(1, 10):
        watched.micro_batches = number
        watched.passes(10)
    assert looks == []


def test_what_it_has_seen_ends_with_the_function_that_has_it(watched):
    """Such as the activations of a forward pass, or the model of a run, which keeps the threads of gloo."""

    def forward():
        activations = torch.ones(2)
        watched.passes(15)
        return weakref.ref(activations)

    watched.micro_batches = 1
    assert forward()() is None


def test_nothing_is_said_before_the_first_batch_and_after_the_run(watched):
    watched.passes(70)
    watched.micro_batches = 1
    watched.passes(5)
    watched.micro_batches = 0
    watched.passes(70)
    assert watched.said() == []


@pytest.mark.parametrize("part", watchdog.LONG[1:])
def test_a_compilation_is_not_reported(watched, part):
    """Not by torch.compile itself, after which processes that are forked from this one fail."""
    file = Path(torch.__file__).parents[1] / part
    assert file.is_file()
    compiles = {"watched": watched}
    exec(compile("def compiles(): watched.passes(70)", file, "exec"), compiles)
    watched.micro_batches = 1
    compiles["compiles"]()
    assert watched.said() == []


def test_a_slow_checkpoint_is_not_reported(watched, tmp_path, monkeypatch):
    watched.micro_batches = 1
    monkeypatch.setattr(folder, "fsync", lambda path: watched.passes(70))
    folder.write_manifest(tmp_path / "manifest.json", {})
    assert watched.said() == []
    watched.passes(70)  # what hangs after it is
    assert len(watched.said()) == 1


def test_gloo_is_bound_to_the_interface_of_the_route(monkeypatch):
    probe = SimpleNamespace(connect=lambda _: None, getsockname=lambda: ("10.0.0.5", 1))
    monkeypatch.setattr(launched.socket, "socket", lambda *_: contextlib.nullcontext(probe))
    addresses = {"lo": ["127.0.0.1"], "eth7": ["fe80::1", "10.0.0.5"]}
    interfaces = {name: [SimpleNamespace(address=a) for a in found] for name, found in addresses.items()}
    monkeypatch.setattr(launched.psutil, "net_if_addrs", lambda: interfaces)
    for name, value in {"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    launched.bind_gloo_to_the_route()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    launched.bind_gloo_to_the_route()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    probe.getsockname = lambda: ("127.0.0.1", 1)  # rank 0 is on this machine
    launched.bind_gloo_to_the_route()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
