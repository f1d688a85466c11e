"""A step that does not come to its end, as one whose tracker waits for a server."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.signals import StopSignal

parser = argparse.ArgumentParser()
parser.add_argument("--timeout_s", type=int, default=600)
accelerator = launch.make_accelerator(argparse.Namespace(**vars(parser.parse_args()), output_dir="run"))
StopSignal(accelerator)
accelerator.wait_for_everyone()
accelerator.print("stuck", flush=True)
while True:
    time.sleep(1000)
