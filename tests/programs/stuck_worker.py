"""A data worker that does not come back from a read; it prints its process id."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.accelerator import TrainingAccelerator
from utils.loader import GlobalLoader


class Stuck:
    fingerprint = "stuck"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        time.sleep(1000)


next(iter(GlobalLoader(Stuck(), 4, TrainingAccelerator(cpu=True), seed=0, num_workers=1)))
