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

from utils import launched
from utils.failures import watchdog
from utils.failures.errors import explain_errors
from utils.failures.watchdog import Watchdog, sentence_about

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
    lost = rf"error: rank 0 on \S+ lost another process at \S*hangs.py:{line_with('# third')}: (Connection|Read error)"
    wait_for(process, lost + r".*; to continue: accelerate launch .* --resume\n")
    wait_for(process, "traceback : " + lost)  # the launcher's report


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
    """What rank 1 says of an error."""
    monkeypatch.setenv("RANK", "1")
    watchdog = Watchdog(SimpleNamespace(resume=False, output_dir="runs/new"))
    watchdog.accelerator, watchdog.progress = SimpleNamespace(steps_done=0), [0, 5]

    def say(error, **changes):
        vars(watchdog).update(changes)
        explain_errors(watchdog.about_lost)
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    return say


GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:545] "


@pytest.mark.parametrize(
    ("kind", "words", "shown"),
    [
        (RuntimeError, "Connection closed by peer [10.0.0.3]:64. This is typically ...", "peer [10.0.0.3]:64"),
        (RuntimeError, "Read error [10.0.0.1]:64: Connection reset by peer", None),
        (RuntimeError, "Timed out waiting 8001ms for recv operation to complete", None),
        (RuntimeError, "NCCL communicator was aborted on rank 0.", None),
        (distributed.DistStoreError, "wait timeout after 4000ms, keys: /x", None),
        (distributed.DistNetworkError, "Connect to [10.0.0.11]:64: No route to host", None),
        (distributed.DistBackendError, "unhandled system error (run with NCCL_DEBUG=INFO for details)", None),
    ],
)
def test_a_lost_process_is_one_line(said, kind, words, shown):
    is_of_gloo = kind is RuntimeError and "NCCL" not in words
    sentence = said(kind(GLOO + words if is_of_gloo else words), found="rank 3 slept")
    assert re.match(r"error: rank 1 on \S+ lost another process at an unknown line: ", sentence)
    assert f"{(shown or words).rstrip('.')}; rank 3 slept; to continue: " in sentence
    assert sentence.endswith(" --output_dir runs/new --resume\n")
    assert sentence.count("\n") == 1
    assert "to continue" not in said(kind(GLOO + words if is_of_gloo else words), args=SimpleNamespace())


@pytest.mark.parametrize(
    "bug",
    [
        RuntimeError("DataLoader timed out after 5 seconds"),
        RuntimeError("connection reset by peer"),  # of a database that a dataset reads
        TimeoutError("timed out"),
        KeyError("connection closed"),
        RuntimeError(GLOO + "op.preamble.length <= op.nbytes. 8 vs 4"),
        distributed.DistBackendError("NCCL error: invalid usage"),
    ],
)
def test_any_other_error_keeps_its_traceback(said, bug):
    assert type(bug).__name__ in said(bug).splitlines()[0]


@pytest.fixture
def dog(monkeypatch):
    """The watchdog of rank 1 of 2, watching."""
    hooks = {}
    group = SimpleNamespace(
        supports_abort_hooks=True,
        register_abort_hook=hooks.__setitem__,
        _get_sequence_number_for_group=lambda: 5,
    )
    monkeypatch.setattr(watchdog.distributed, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(watchdog.distributed.distributed_c10d, "_get_default_store", distributed.HashStore)
    monkeypatch.setattr(watchdog, "gather_object", lambda states: [*states, *states])
    monkeypatch.setenv("RANK", "1")
    dog = Watchdog(SimpleNamespace())
    dog.watch(SimpleNamespace(num_processes=2, process_index=1, steps_done=0), timeout_s=600)
    (dog.hook,) = hooks.values()
    yield dog
    dog.end()


def test_what_nccl_lost_is_said_before_it_aborts_the_process(dog, monkeypatch, tmp_path, capsys):
    """torch calls the hook from a thread of its own, while the main thread waits for the GPU."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    thread = threading.Thread(target=dog.hook)
    thread.start()
    thread.join()
    dog.hook()  # said once
    dog.end()
    dog.hook()  # the end of the group is not a failure
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: rank 1 on \S+ lost another process at \S+test_watchdog.py:\d+: NCCL .*\n", said)
    assert said.strip() in (tmp_path / "error.json").read_text()


def test_a_process_that_was_stopped_has_not_waited(dog):
    dog.end()
    now = time.monotonic()
    still_s = dog.publish(now)["still_s"]
    assert dog.publish(now + 15)["still_s"] == pytest.approx(still_s + 15)
    assert dog.publish(now + 45)["still_s"] == 0  # no beat for half a minute: SIGSTOP


def test_gloo_is_bound_to_the_interface_of_the_route(monkeypatch):
    monkeypatch.setattr(launched, "route_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    launched.bind_gloo_to_the_route()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    launched.bind_gloo_to_the_route()
    addresses = launched.psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [entry.address for entry in addresses]
