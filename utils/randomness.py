"""Random numbers computed from a key, such as (seed, epoch, sample), instead of a generator's state.

That state depends on how often the generator was used, and so on processes, workers and resuming.
"""

import contextlib
import enum
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from accelerate import Accelerator

MASK = 0xFFFFFFFF


def mix_bits(x):
    """A bijection on 32-bit integers (int or int64 tensor): flipping a bit of x flips about half of the result's bits.

    Source: "lowbias32" of C. Wellons, https://nullprogram.com/blog/2018/07/31/.
    """
    x = x & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def combine(*numbers):
    """Hash integers, of which one may be an int64 tensor, into a 32-bit key; their order matters."""
    key = 0
    for number in numbers:
        key = mix_bits(key + number)
    return key


class Purpose(enum.IntEnum):
    """What random numbers are for: the last number of their key, so that no two uses have the same ones."""

    EPOCH = 1  # the generators, at its start
    AFTER_EPOCH = 2  # after its last step, before the test
    SAMPLES = 3  # batch.rand and batch.randn
    AFTER_RUN = 4
    LOADER = 5  # a test loader, or a second training loader
    AFTER_TEST = 6


def random_uniform(key: int, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform numbers in [0, 1), float32 (n, *shape), that depend only on (key, index, position in `shape`).

    Each use needs its own `key`; `indices` is int64 (n,).
    """
    positions = torch.arange(math.prod(shape), device=indices.device)
    keys = mix_bits(key + indices)
    bits = mix_bits(keys[:, None] + mix_bits(positions + 1))
    return ((bits >> 8).to(torch.float32) / 2**24).view(len(indices), *shape)


def random_normal(key: int, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """As `random_uniform`, but standard normal, by the Box-Muller transform."""
    dtype = widest_float(indices.device)
    radius = random_uniform(combine(key, 1), indices, shape).to(dtype)
    angle = random_uniform(combine(key, 2), indices, shape).to(dtype)
    normal = (-2 * torch.log1p(-radius)).sqrt() * (2 * math.pi * angle).cos()
    return normal.to(torch.float32)


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple GPUs, which lack float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def device_generators(accelerator: Accelerator) -> Sequence:
    """torch's generators of this process's devices, besides the CPU: of all GPUs, if there are no other processes."""
    device = accelerator.device
    if device.type != "cuda":
        return [] if device.type == "cpu" else [torch.get_device_module(device)]  # has manual_seed, too
    torch.cuda.init()  # there are none before
    generators = torch.cuda.default_generators
    return generators if accelerator.num_processes == 1 else [generators[torch.cuda.current_device()]]


def seed_generators(key: int, devices: Sequence = ()) -> None:
    """Seed the global generators of torch (CPU), Python and NumPy, and `device_generators`, each with its own key.

    Takes about 10 us per training step.
    """
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key)
    for number, generator in enumerate(devices):
        generator.manual_seed(combine(key, number) if number else key)  # replicas of a model have different masks


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """On exit, restore the state of the three global generators."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
