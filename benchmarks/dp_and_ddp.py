"""A step of DataParallel against a step of DDP.

    python benchmarks/dp_and_ddp.py

Two devices with one thread each on the CPU: threads of one process, as in nn.DataParallel, against processes, as in
DistributedDataParallel. The model and the batch of 90 images are those of scripts/from_scratch/data_parallel.py, in
float32, and the optimizer has momentum; its logits are by far the largest tensor. benchmarks/gpus.py has the same
comparison on GPUs, with dp.yaml and ddp.yaml.

- one device: plain autograd, one thread
- DataParallel: the phases of nn.DataParallel, by hand: the logits gathered on the first device, or the loss inside
- DDP: 45 images for each of two processes, torch's DistributedDataParallel over gloo
"""

import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "scripts" / "from_scratch"))  # for its imports

import data_parallel

from benchmarks import common

ONE, DDP = "one device", "DDP, two processes"
WAYS = {"DataParallel, logits gathered": False, "DataParallel, loss inside": True}
BATCH = 90


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=common.positive_int, default=20, help="per round (%(default)s)")
    return parser.parse_args()


def make_batches(count: int) -> list[torch.Tensor]:
    """Random digits, uint8 (BATCH, 1, 28, 28); the same on all processes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (BATCH, 1, 28, 28), dtype=torch.uint8, generator=generator) for _ in range(count)]


def ms_per_step(step, batches: list[torch.Tensor]) -> float:
    """The median without the first step."""
    times_ms = []
    for images in batches:
        began = time.perf_counter()
        step(images)
        times_ms.append(1000 * (time.perf_counter() - began))
    return statistics.median(times_ms[1:])


def plain_step(model, optimizer, images) -> None:
    data_parallel.compute_losses(model(images), images).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def time_way(way: str, batches: list[torch.Tensor]) -> float:
    model, optimizer = data_parallel.make_model(SimpleNamespace(seed=0, dtype="float32", lr=0.1), batches)
    if way == ONE:
        return ms_per_step(lambda images: plain_step(model, optimizer, images), batches)
    if way == DDP:
        model, rank = DistributedDataParallel(model), distributed.get_rank()
        parts = [images.chunk(distributed.get_world_size())[rank] for images in batches]
        return ms_per_step(lambda images: plain_step(model, optimizer, images), parts)
    devices = data_parallel.CpuDevices(2)

    def step(images):
        devices.reset()
        data_parallel.data_parallel_step(model, optimizer, images, devices, loss_inside=WAYS[way])

    return ms_per_step(step, batches)


def worker(args) -> float:
    """The time of DDP on two processes."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    return time_way(DDP, make_batches(args.steps + 1))


def measure(args) -> dict[str, list[float]]:
    batches = make_batches(args.steps + 1)
    ways = {way: lambda way=way: time_way(way, batches) for way in (ONE, *WAYS)}
    ways[DDP] = lambda: common.launch_workers("cpu_ddp", __file__)
    with common.threads(1):
        return common.take_turns(ways, args.rounds)


def report(measured) -> list[str]:
    return [common.compare("on", [("2 CPU cores", measured)], "ms per step", ONE, "{:.1f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
