"""What a run shows while it runs, and the time that is left."""

import io
import sys

import pytest

from utils import console, progress
from utils.extras import progress_bar
from utils.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def make():
    def make(step=0):
        # 6 test samples, a batch of 2: a third of 3 steps.
        return Progress(step, total_steps=10, steps_per_epoch=5, test_steps=1.0, shows=True)

    return make


class Clock:
    """In the place of the module time: what the run does takes the seconds that the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress, "time", self)
        monkeypatch.setattr(progress_bar, "time", self)
        self.perf_counter = self.time = lambda: self.now
        self.strftime = lambda _: "now"


@pytest.mark.parametrize("resumed_at", [0, 5])
def test_the_time_left_counts_steps_and_evaluations(make, monkeypatch, capsys, resumed_at):
    """10 steps of 2 batches and 1 s, the first one 10 s; a test after 5 and 10, of 3 s.

    The time of the first test is a guess: that of one step.
    """
    clock = Clock(monkeypatch)
    shown = make(resumed_at)
    assert shown.step_time(resumed_at) == (0, 0)  # not known yet
    evaluated = {0: 0, 5: 1}[resumed_at]  # a run resumed at the end of an epoch begins with its evaluation
    if evaluated:
        clock.now += 3
        shown.show_line("test", 5, 1, {"loss": 1.0})
    step = resumed_at
    for batch in shown.timed(range(10), 2):
        clock.now += 5 if step == resumed_at else 0.5
        if batch % 2:
            step += 1
            if step % 5 == 0:  # the body of this step is not over
                shown.show_line("train", step, 1, {"loss": 1.0})
    left = {0: "0:00:07", 5: "0:00:03"}[resumed_at]  # of the first test only its size is known: that of one step
    assert f"eta {left}\n" in capsys.readouterr().out
    clock.now += 3
    shown.show_line("test", step, 1, {"loss": 1.0})
    assert shown.step_time(step) == (1.0, {0: 5 * 1 + 3, 5: 0}[resumed_at])
    assert make(7).tests_left == 1  # the first one was before


def test_the_bar_is_gone_where_a_line_is_printed_and_at_the_end(make, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    clock = Clock(monkeypatch)
    shown = make()
    for batch in shown.timed(range(20), 2):
        clock.now += 0.25
        if batch % 10 == 9:
            shown.show_line("train", (batch + 1) // 2, 1 + batch // 10, {"loss": 1.0, "accuracy": 0.5})
            shown.show_line("test", (batch + 1) // 2, 1 + batch // 10, {"loss": 1.0, "accuracy": 0.5})
    console.show("done: test loss", "green")
    drawn = terminal.getvalue()
    assert "| 3/10 steps, 2.0 steps/s, 0:00:04 left" in drawn
    assert "| 5/10 steps, testing, " in drawn
    screen = []  # what can be read after each line
    for line in drawn.split("\n"):
        row = ""
        for piece in line.split("\r"):
            row = piece.removeprefix("\033[K") if piece.startswith("\033[K") else piece + row[len(piece) :]
        screen.append(row.strip())
    assert [line[:13] for line in screen[:4:2]] == ["train epoch 1", "train epoch 2"]
    assert [line[:13] for line in screen[1:4:2]] == ["test  epoch 1", "test  epoch 2"]
    assert "left" not in "".join(screen)
    assert screen[4].startswith("\033[1;32mdone:\033[0m test loss")
    assert screen[5:] == [""]
    assert "left" not in drawn.partition("done:")[0].rpartition("\n")[2]  # gone before the model is saved


def test_waiting_for_data_is_measured(make):
    import time

    def slow():
        for i in range(3):
            time.sleep(0.02)
            yield i

    shown = make()
    for _ in shown.timed(slow(), 1):
        time.sleep(0.01)
    assert 0.06 <= shown.timer.wait_s < shown.timer.train_s
    assert shown.timer.train_s >= 0.09
    for _ in shown.timed(slow(), 1):
        time.sleep(0.05)
        break
    assert shown.timer.train_s >= 0.16  # the step that was left by break counts too
