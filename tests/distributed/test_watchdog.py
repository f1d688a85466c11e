"""The rank that the others wait for is named, with its line; a lost peer is one sentence; a bug keeps its traceback."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from torch import distributed

from utils import topology, watchdog
from utils.console import explain_errors
from utils.watchdog import Watchdog, is_lost_peer, sentence_about

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
def test_a_loop_a_stopped_and_a_killed_process_are_named_within_the_time_out(launcher):
    folder = launcher.folder
    process = launcher.start("cpu_ddp", script=PROGRAM.with_suffix(""), stderr=subprocess.STDOUT)
    place = r"rank {} on \S+ at \S*hangs.py:{} in step {}"
    waits = rf"{place} has waited \d+ s for {place}"
    advice = r"; the run ends when a wait takes 40 s; to continue: accelerate launch .* --resume\n"
    wait_for(process, "warning: " + waits.format(0, line_with("# first"), 7, 1, r"\d+", 7) + advice)
    (folder / "first").touch()
    wait_for(process, "rank 1 goes on")
    stopped = waits.format(1, line_with("# backward"), 8, 0, line_with("# second"), 8)
    wait_for(process, f"warning: {stopped}, whose process is stopped or gone{advice}")
    os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    error = r"error: rank 0 on (\S+) lost rank 1 on \1 at \S*stuck_step.py:\d+: its process has ended"
    said = rf"{error}; to continue: accelerate launch .* --resume\n"
    wait_for(process, said)
    wait_for(process, f"traceback : {said}")  # the launcher's report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(launcher, small_mnist):
    """One that frees a tensor then would abort the process, whose run was a success."""
    flags = ["--dataset", small_mnist, "--output_dir", "run", "--max_steps", 3]
    done = launcher("cpu_ddp", *flags, script=ROOT / "tests" / "programs" / "threads_at_exit")
    assert done.stdout.count("0 threads of gloo") == 2


def place(**changes):
    """A rank that stands still in step 3 since it began its collective 5."""
    still = {"at": "train.py:9", "progress": [3, 5], "host": "alpha", "still_s": 70.2, "silent": False}
    return {**still, **changes}


behind = {"at": "data.py:270", "progress": [3, 4], "host": "beta"}


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [place(), place(), place(**behind)],
            "rank 0 on alpha at train.py:9 in step 3 has waited 70 s for rank 2 on beta at data.py:270 in step 3",
        ),
        (
            [place(progress=[2, 99]), place()],
            "rank 1 on alpha at train.py:9 in step 3 has waited 70 s for rank 0 on alpha",
        ),
        (
            [place(silent=True), place()],
            "rank 1 on alpha at train.py:9 in step 3 has waited 70 s for "
            "rank 0 on alpha at train.py:9 in step 3, whose process is stopped or gone",
        ),
        ([place(), place(at="other.py:1")], "no rank has progressed for 70 s: rank 0 on alpha at train.py:9 in step 3"),
        ([place(still_s=59), place()], None),  # all may compute
    ],
)
def test_the_sentence(ranks, sentence):
    said = sentence_about(ranks, timeout_s=120)
    assert said is None if sentence is None else said.startswith(sentence)


@pytest.fixture
def said(monkeypatch, capsys):
    """What rank 1 of 4 on the machines alpha, alpha, beta and gamma says of an error."""
    monkeypatch.setenv("RANK", "1")
    watchdog = Watchdog(SimpleNamespace(resume=False, output_dir="runs/new"))
    addresses = {"alpha": "10.0.0.1", "beta": "10.0.0.11", "gamma": "10.0.0.111"}
    process = {"launcher": 1, "pid": os.getpid()}
    hosts = ("alpha", "alpha", "beta", "gamma")
    watchdog.ranks = [{"host": host, "address": addresses[host], **process} for host in hosts]
    watchdog.me, watchdog.beat_at, watchdog.patience_s = watchdog.ranks[1], time.monotonic(), 60
    watchdog.progress = [watchdog.step, 5]

    def say(error, **changes):
        vars(watchdog).update(changes)
        explain_errors((is_lost_peer, watchdog.sentence))
        sys.excepthook(type(error), error, None)
        return re.sub(r"(?<=rank 1 on )\S+", "alpha", capsys.readouterr().err, count=1)

    return say


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("[/gloo/pair.cc:545] Connection closed by peer [10.0.0.111]:64. This is typically ...", "rank 3 on gamma"),
        ("Read error [10.0.0.11]:64: Connection reset by peer", "rank 2 on beta"),
        ("writev [10.0.0.11]:64: Broken pipe", "rank 2 on beta"),
        ("Connect to [10.0.0.11]:64: No route to host", "rank 2 on beta"),
        ("NCCL error: remote process exited or there was a network error, 10.0.0.11", "rank 2 on beta"),
        ("Timed out waiting 8001ms for recv", "another process"),
        ("NCCL Async Error: unhandled system error (run with NCCL_DEBUG=INFO for details)", "another process"),
        ("NCCL communicator was aborted on rank 0.", "another process"),
    ],
)
def test_the_machine_that_the_error_names_is_lost(said, words, lost):
    sentence = said(RuntimeError(words))
    assert sentence.startswith(f"error: rank 1 on alpha lost {lost} at an unknown line: ")
    assert sentence.endswith(" --output_dir runs/new --resume\n")
    assert sentence.count("\n") == 1


def test_what_nccl_lost_is_said_before_it_aborts_the_process(monkeypatch, tmp_path, capsys):
    """torch calls the hook from a thread of its own, while the main thread waits for the GPU."""
    hooks = {}
    group = SimpleNamespace(
        supports_abort_hooks=True,
        register_abort_hook=hooks.__setitem__,
        _get_sequence_number_for_group=lambda: 5,
    )
    monkeypatch.setattr(watchdog.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(watchdog.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(watchdog.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(watchdog.distributed, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(watchdog.distributed.distributed_c10d, "_get_default_store", distributed.HashStore)
    monkeypatch.setattr(watchdog, "gather_object", lambda states: [{**states[0], "host": "alpha"}, *states])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "1")
    dog = Watchdog(SimpleNamespace())
    dog.watch(timeout_s=600)
    dog.ranks[0]["silent"] = True
    (hook,) = hooks.values()
    thread = threading.Thread(target=hook)
    thread.start()
    thread.join()
    dog.end()
    hook()  # the end of the group is not a failure
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(BlockingIOError):  # a child's signal is its own
        os.read(dog.signals, 1)
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: rank 1 on \S+ lost rank 0 on alpha at \S+test_watchdog.py:\d+: NCCL .*\n", said)
    assert said.strip() in (tmp_path / "error.json").read_text()


def test_ranks_that_are_silent_or_behind_are_named_too(said):
    error = RuntimeError("Timed out waiting 8001ms for recv")
    hosts = ("alpha", "alpha", "beta", "gamma")
    process = {"address": None, "launcher": 1, "pid": os.getpid()}
    ranks = [{"host": host, "silent": host == "gamma", **process} for host in hosts]
    assert "rank 1 on alpha lost rank 3 on gamma at " in said(error, ranks=ranks, found="rank 3 slept")
    assert ": Timed out waiting 8001ms for recv; rank 3 slept; to continue: " in said(error)
    ranks[0]["host"] = "delta"  # the store is there, and no longer answers
    assert " lost rank 0 on delta at " in said(error, beat_at=time.monotonic() - 21)
    assert "to continue" not in said(error, args=SimpleNamespace())


def test_a_bug_keeps_its_traceback(said):
    for bug in (RuntimeError("mat1 and mat2 shapes differ"), KeyError("connection closed")):
        assert said(bug).startswith(type(bug).__name__)


def test_gloo_is_bound_to_the_interface_of_the_route(monkeypatch):
    monkeypatch.setattr(topology, "route_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    topology.bind_gloo_to_the_route()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    topology.bind_gloo_to_the_route()
    addresses = topology.psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [entry.address for entry in addresses]
