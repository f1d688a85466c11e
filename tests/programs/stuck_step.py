"""A step that does not end: it waits for a tracker's server or, with --as_for_a_gpu, in a call that no signal ends."""

import argparse
import ctypes
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def wait_as_for_a_gpu() -> None:
    """For ever, in a call that releases the GIL and that signals do not end: as cudaStreamSynchronize after NCCL."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


if __name__ == "__main__":
    from utils import launch
    from utils.failures.signals import StopSignal

    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout_s", type=int, default=600)
    parser.add_argument("--as_for_a_gpu", action="store_true")
    args = parser.parse_args()
    accelerator = launch.make_accelerator(argparse.Namespace(timeout_s=args.timeout_s, output_dir="run"))
    stop_signal = StopSignal(accelerator)
    accelerator.wait_for_everyone()
    accelerator.print("stuck", flush=True)
    if args.as_for_a_gpu:
        wait_as_for_a_gpu()
    while not stop_signal.received:
        time.sleep(0.01)
    Path(f"stops_{accelerator.process_index}").touch()
    while True:  # not one long sleep: Python would miss a signal that comes just before it
        time.sleep(0.01)
