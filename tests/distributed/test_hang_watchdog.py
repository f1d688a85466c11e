"""A rank that the others wait for is named, with where it is."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time

import pytest
from conftest import ROOT

from utils import launch
from utils.extras.hang_watchdog import UNKNOWN, place_of, sentence_about

PROGRAM = ROOT / "tests" / "programs" / "hangs.py"


def line_with(text: str) -> int:
    text_before = PROGRAM.read_text().partition(text)[0]
    return text_before.count("\n") + 1


class Lines(threading.Thread):
    """What a process prints, as it comes."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.text = process, ""
        self.start()

    def run(self):
        for line in self.process.stdout:
            self.text += line

    def wait_for(self, pattern, timeout=90):
        ends = time.monotonic() + timeout
        while not re.search(pattern, self.text):
            assert time.monotonic() < ends, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.02)


@pytest.mark.slow
def test_a_loop_a_stopped_process_and_another_collective_are_named(launcher):
    folder = launcher.folder
    process = launcher.start("cpu_ddp", script=PROGRAM.with_suffix(""), stderr=subprocess.STDOUT)
    lines = Lines(process)
    host = r"on \S+"
    at = r"at \S*hangs.py:{} in step {}"
    waits = rf"rank {{}} {host} waits in {{}} {at} since \d+ s for rank {{}} {host}, "
    lines.wait_for(
        "warning: "
        + waits.format(0, "all_reduce", line_with("# first"), 7, 1)
        + r"which is at \S*hangs.py:\d+ in step 7 since \d+ s\n"
    )
    (folder / "first").touch()
    lines.wait_for("rank 1 goes on")
    lines.wait_for(
        "warning: "
        + waits.format(1, "backward", line_with("# backward"), 8, 0)
        + "whose process is stopped or gone; it was last seen "
        + at.format(line_with("# second"), 8)
    )
    os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    both = (
        rf"rank 0 {host} waits in all_reduce {at.format(line_with('# third'), 9)} since \d+ s, "
        rf"its collective \d+; rank 1 {host} waits in barrier "
        rf"{at.format(line_with('# other'), 9)} since \d+ s, its collective \d+"
    )
    lines.wait_for(f"warning: the ranks wait for each other: {both}")
    process.wait(60)
    lines.join(10)
    assert re.search(rf"error: rank \d {host} lost .*; the ranks wait for each other: {both}", lines.text)
    assert lines.text.count("warning: ") == 3


def place(**changes):
    """A rank that waits in its collective 5 for 70 s."""
    waits = {"at": "train.py:9", "waits_in": "all_reduce", "step": 3, "host": "alpha"}
    return {**UNKNOWN, **waits, "since_s": 70.2, "collectives": 5, "answers": True, **changes}


computes = {"waits_in": None, "at": "data.py:270", "collectives": 4}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        ([place(), place()], "all ranks 0, 1 wait in all_reduce at train.py:9 in step 3 since 70 s"),
        (
            [place(), place(), place(**computes, host="beta", since_s=61)],
            "ranks 0, 1 wait in all_reduce at train.py:9 in step 3 since 70 s for rank 2 on beta, "
            "which is at data.py:270 in step 3 since 61 s",
        ),
        (
            [place(answers=False, host="beta", step=2), place()],
            "rank 1 on alpha waits in all_reduce at train.py:9 in step 3 since 70 s for rank 0 on "
            "beta, whose process is stopped or gone; it was last seen at train.py:9 in step 2",
        ),
        (
            [place(), {**UNKNOWN, "answers": False}],
            "rank 0 on alpha waits in all_reduce at train.py:9 in step 3 since 70 s for rank 1 on "
            "?, whose process is stopped or gone; it was last seen at an unknown line",
        ),
        (
            [place(), place(collectives=6)],
            "the ranks wait for each other: rank 0 on alpha waits in all_reduce at train.py:9 in "
            "step 3 since 70 s, its collective 5; rank 1 on alpha waits in all_reduce at "
            "train.py:9 in step 3 since 70 s, its collective 6",
        ),
        # Nobody waits for long enough; all compute; a rank has come at this moment.
        ([place(since_s=50), place(since_s=50)], None),
        ([place(since_s=50), place(**computes)], None),
        ([place(**computes), place(**computes)], None),
        ([place(waits_in="backward"), place(waits_in="backward")], None),
        ([place(), place(since_s=0.1)], None),
    ],
)
def test_the_sentence(places, sentence):
    said = sentence_about(places, 60)
    assert said is None if sentence is None else said.startswith(sentence)


def test_a_place_is_the_innermost_line_outside_of_libraries():
    def own_place():
        return place_of(sys._getframe())

    here = os.path.relpath(__file__)
    line = own_place.__code__.co_firstlineno + 1
    assert own_place() == {"at": f"{here}:{line}", "waits_in": None}
    names = {"sys": sys}
    # As if these functions were torch's; the last one is accelerator.backward, in which the script's line is asked for.
    torch = sysconfig.get_path("purelib") + "/torch/"
    for file, name, waits_in in (
        (torch + "distributed/distributed_c10d.py", "all_gather", "all_gather"),
        (torch + "autograd/graph.py", "_engine_run_backward", "backward"),
        (torch + "nn/functional.py", "linear", None),
        (launch.__file__, "backward", None),
    ):
        code = f"def {name}(function): return function(sys._getframe())"
        exec(compile(code, file, "exec"), names)
        line = sys._getframe().f_lineno + 1
        found = names[name](place_of)
        assert found == {"at": f"{here}:{line}", "waits_in": waits_in}
