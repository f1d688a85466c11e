"""What a run shows while it runs, and how it measures time."""

import io
import sys

import pytest

from utils import progress
from utils.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """In the place of the module time: what the run does takes the seconds that the test says."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    monkeypatch.setattr(progress, "time", Clock())
    return progress.time


def test_the_time_left_is_for_the_steps_to_go(clock, capsys):
    shown = Progress(5, total_steps=10, shows=True)
    for _ in shown.timed(range(4)):
        clock.now += 1
    shown.show_line("train", 7, 1, {"loss": 1.0}, {})
    assert capsys.readouterr().out.endswith("loss 1.0000  eta 0:00:06\n")
    shown.show_line("test", 7, 1, {"loss": 1.0}, {"tokens/s": 256})
    assert capsys.readouterr().out.endswith("loss 1.0000\n")


def test_a_script_adds_speeds_in_its_own_units(clock, capsys):
    shown = Progress(0, total_steps=10, shows=True)
    shown.show_line("train", 5, 1, {"samples_per_s": 50.0}, {"tokens/s": 256, "MFU": 0.008})
    assert "50 samples/s  12,800 tokens/s  0.40 MFU" in capsys.readouterr().out


def test_a_bar_on_a_terminal_counts_steps_and_is_gone_at_the_end(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = Progress(3, total_steps=10, shows=True)
    for _ in shown.timed(range(4)):
        shown.step_done(samples=2)
    assert shown.bar.n == 7
    shown.say_done(10, {}, tmp_path)
    assert shown.bar.disable  # otherwise tqdm's thread may draw it again
    assert "7/10" not in sys.stderr.getvalue().rpartition("\r")[2]


def test_waiting_for_data_and_speed_are_measured_since_the_last_line(clock):
    shown = Progress(0, total_steps=4, shows=False)

    def batches():
        for number in range(4):
            clock.now += 1 if number < 2 else 3
            yield number

    for number in shown.timed(batches()):
        clock.now += 1
        shown.step_done(samples=10)
        if number % 2:
            lines = shown.since_last_line()
            expected = {1: (5.0, 50.0), 3: (2.5, 75.0)}[number]
            assert (lines["samples_per_s"], lines["data_wait_pct"]) == expected
    summary = shown.summary(4)
    assert (summary["train_time_s"], summary["train_steps_timed"], summary["samples_per_s"]) == (12.0, 4, 3.3)
