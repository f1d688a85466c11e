"""One rank in an endless loop, then one that is stopped, then one that is killed."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.failures.signals import StopSignal

accelerator = launch.make_accelerator(argparse.Namespace(timeout_s=40, output_dir="run", resume=False))
rank, ones = accelerator.process_index, torch.ones(2)
StopSignal(accelerator)


def until(name):
    while not Path(name).exists():
        time.sleep(0.01)  # endless loop


accelerator.steps_done, accelerator.micro_batches = 7, 1
if rank == 1:
    until("first")
torch.distributed.all_reduce(ones)  # first
print(f"rank {rank} goes on", flush=True)

accelerator.steps_done, accelerator.micro_batches = 8, 2
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if rank == 0:
    Path("pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
model(ones).sum().backward()  # backward
print(f"rank {rank} goes on", flush=True)

accelerator.steps_done, accelerator.micro_batches = 9, 3
Path(f"after_{rank}").touch()
if rank == 1:
    until("after_0")
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.all_reduce(ones)  # third
