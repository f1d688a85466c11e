"""One rank in a loop without an end, then one that is stopped, then two in different collectives."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.extras import hang_watchdog as watchdog

accelerator = launch.make_accelerator(argparse.Namespace(timeout_s=12, output_dir="run"))
rank, ones = accelerator.process_index, torch.ones(2)


def until(name):
    while not Path(name).exists():
        time.sleep(0.01)  # loop without an end


watchdog.reached(7)
if rank == 1:
    until("first")
torch.distributed.all_reduce(ones)  # first
print(f"rank {rank} goes on", flush=True)

watchdog.reached(8)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if rank == 0:
    Path("pid").write_text(str(os.getpid()))
    time.sleep(1)  # second: here the watchdog has seen it last
    os.kill(os.getpid(), signal.SIGSTOP)
model(ones).sum().backward()  # backward
print(f"rank {rank} goes on", flush=True)

watchdog.reached(9)
time.sleep(1)  # slow, but not late
if rank == 0:
    torch.distributed.all_reduce(ones)  # third
else:
    accelerator.wait_for_everyone()  # other
