"""Prints seconds to the first batch of an epoch over a billion items, MiB for 1000 batches, the largest index of
the first one, and the number of batches."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.harness.fakes import fake_accelerator
from utils.loader import GlobalLoader


def peak_mib():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


accelerator = fake_accelerator(processes=4, rank=1, gradient_accumulation_steps=2)
next(iter(GlobalLoader(range(2000), 256, accelerator, seed=0).epoch(1)))  # the first one imports and allocates
before, start = peak_mib(), time.perf_counter()
loader = GlobalLoader(range(10**9), 256, accelerator, seed=0)
batches = loader.epoch(1, first_step=3_000_000)
first = next(batches)
seconds = time.perf_counter() - start
for _ in range(999):
    next(batches)
print(seconds, peak_mib() - before, int(first.indices.max()), len(loader))
