"""Looks for the largest size that fits, where rank 1 has memory for 10 only."""

import sys
from pathlib import Path

from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.memory import largest_that_fits

accelerator = Accelerator(cpu=True)


def attempt(size):
    if accelerator.process_index == 1 and size > 10:
        raise MemoryError


found = largest_that_fits(attempt, 64, accelerator)
print(f"process {accelerator.process_index}: {found}")
accelerator.wait_for_everyone()
accelerator.end_training()
