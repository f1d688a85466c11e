"""What a run shows while it runs, and how it measures time."""

import pytest
import torch
from accelerate import Accelerator

from utils import progress
from utils.progress import Progress, own_peak_memory_gib, peak_memory_gib


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


def test_waiting_for_data_and_speed_are_measured_since_the_last_line(clock):
    shown = Progress(0, total_steps=4, shows=False)

    def batches():
        for number in range(4):
            clock.now += 1 if number < 2 else 3
            yield number

    for number in shown.timed(batches()):
        clock.now += 1
        shown.samples += 10
        if number % 2:
            lines = shown.since_last_line()
            expected = {1: (5.0, 50.0), 3: (2.5, 75.0)}[number]
            assert (lines["samples_per_s"], lines["data_wait_pct"]) == expected
    summary = shown.summary(4)
    assert (summary["train_time_s"], summary["train_steps_timed"], summary["samples_per_s"]) == (12.0, 4, 3.3)


# --- peak memory ------------------------------------------------------------------------------


def test_the_peak_of_several_processes_is_the_largest(monkeypatch):
    monkeypatch.setattr(progress, "gather_object", lambda mine: [*mine, 1000.0, 0.5])
    assert peak_memory_gib(Accelerator(cpu=True)) == 1000


def test_the_peak_of_several_gpus_is_the_fullest_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: (2**30, 3 * 2**30, 0)[device or 0])
    assert own_peak_memory_gib(torch.device("cuda")) == 3
