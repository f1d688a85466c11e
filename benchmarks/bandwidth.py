"""What several processes at once get from this machine.

    python benchmarks/bandwidth.py

The bound for every speed-up below. All processes do the same at the same time, with one thread each: `a = b + c` over
vectors larger than the caches, as optimizers and BatchNorm do (the "add" of STREAM, J. D. McCalpin,
https://www.cs.virginia.edu/stream/), and products of matrices. The speed of all processes together, and the ratio to
one process: a program that only moves memory cannot gain more than the first, nor one that only multiplies more than
the second.
"""

import functools
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

ENTRIES, SIDE = 2**25, 1024  # of a vector; of a matrix


def parse_args():
    parser = common.make_parser(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (%(default)s)")
    return parser.parse_args()


def add_speed(seconds: float) -> float:
    """GB/s: two vectors are read and one is written."""
    a, b, c = (torch.ones(ENTRIES) for _ in range(3))
    return 12e-9 * ENTRIES * repetitions_per_s(lambda: torch.add(b, c, out=a), seconds)


def product_speed(seconds: float) -> float:
    """GFLOP/s."""
    a, b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
    return 2e-9 * SIDE**3 * repetitions_per_s(lambda: torch.mm(a, b), seconds)


def repetitions_per_s(work, seconds: float) -> float:
    work()
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        work()
        count += 1
    return count / (time.perf_counter() - began)


def begin(barrier) -> None:
    """In each process: wait until all have started."""
    torch.set_num_threads(1)
    barrier.wait()


def together(work, seconds: float, processes: int) -> float:
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.common"])  # which imports torch, once
    with context.Pool(processes, begin, (context.Barrier(processes),)) as pool:
        return sum(pool.map(work, [seconds] * processes, chunksize=1))


def measure(args) -> dict[str, dict[str, list[float]]]:
    works = {"sums of vectors, GB/s": add_speed, "products of matrices, GFLOP/s": product_speed}
    measured = {}
    for name, work in works.items():
        ways = {f"{number} at once": functools.partial(together, work, args.seconds, number) for number in (1, 2)}
        measured[name] = common.take_turns(ways, args.rounds)
    return measured


def report(measured) -> list[str]:
    return [common.compare("work", measured.items(), "speed", "1", "{:.1f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
