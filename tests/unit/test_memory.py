import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from utils import progress
from utils.progress import own_peak_memory_gib, peak_memory_gib


def reset_peak() -> None:
    """Restart the measurement of this process's peak resident set size; see man 5 proc."""
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset under Linux only")
def test_the_peak_rises_with_an_allocation_stays_and_is_reset():
    device = torch.device("cpu")
    reset_peak()
    before = own_peak_memory_gib(device)
    big = torch.ones(2**26)  # 0.25 GiB
    high = own_peak_memory_gib(device)
    assert 0.2 < high - before < 0.3
    del big
    # The kernel counts on each core for itself and sums up now and then.
    assert own_peak_memory_gib(device) == pytest.approx(high, abs=0.01)
    reset_peak()
    assert own_peak_memory_gib(device) < before + 0.1


def test_the_peak_of_several_processes_is_the_largest(monkeypatch):
    monkeypatch.setattr(progress, "gather_object", lambda mine: [*mine, 1000.0, 0.5])
    assert peak_memory_gib(Accelerator(cpu=True)) == 1000


def test_the_peak_of_several_gpus_is_the_fullest_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: (2**30, 3 * 2**30, 0)[device or 0])
    assert own_peak_memory_gib(torch.device("cuda")) == 3
