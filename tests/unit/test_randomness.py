"""Random numbers that are a function of their place in the run."""

import random

import numpy as np
import pytest
import torch
from fakes import fake_accelerator

from utils import items, randomness


def state():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def test_mix_bits_is_a_bijection_and_the_same_for_ints_and_tensors():
    numbers = torch.cat([torch.arange(70_000), torch.arange(2**32 - 70_000, 2**32)])
    mixed = randomness.mix_bits(numbers)
    assert len(mixed.unique()) == len(numbers)
    assert mixed.min() >= 0
    assert mixed.max() < 2**32
    assert [randomness.mix_bits(int(n)) for n in numbers[::999]] == mixed[::999].tolist()


def test_combine_counts_the_order_and_takes_a_tensor_at_the_end():
    assert randomness.combine(1, 2) != randomness.combine(2, 1)
    assert randomness.combine(7, 3, torch.tensor([5, 6])).tolist() == [
        randomness.combine(7, 3, 5),
        randomness.combine(7, 3, 6),
    ]


def test_random_uniform_is_a_function_of_key_and_sample_alone():
    indices = torch.randperm(60000)[:512]
    whole = randomness.random_uniform(3, indices, (256,))
    parts = [randomness.random_uniform(3, part, (256,)) for part in indices.tensor_split(7)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.shape == (512, 256)
    other = randomness.random_uniform(4, indices, (256,))
    assert (whole == other).float().mean() < 0.001
    assert randomness.random_uniform(3, indices[:0], (4, 5)).shape == (0, 4, 5)
    assert randomness.random_uniform(3, indices, ()).shape == (512,)


def test_random_uniform_is_uniform_and_uncorrelated():
    parts = []
    for step in range(10):
        key = randomness.combine(0, step)
        parts.append(randomness.random_uniform(key, torch.arange(1000), (8, 16)))
    numbers = torch.cat(parts).double()
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1
    counts = torch.histc(numbers, 64, 0, 1)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    flat = numbers.flatten(1)
    neighbours = [(flat[:, :-1], flat[:, 1:]), (flat[:-1], flat[1:]), (flat[:-1000], flat[1000:])]
    for one, other in neighbours:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / one.numel() ** 0.5


def test_random_normal_has_the_moments_of_a_normal_distribution():
    numbers = randomness.random_normal(11, torch.arange(1000), (200,))
    assert numbers.dtype == torch.float32
    assert numbers.isfinite().all()
    numbers = numbers.double()
    count = numbers.numel()
    assert abs(numbers.mean()) < 5 / count**0.5
    assert abs(numbers.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((numbers**3).mean()) < 5 * (15 / count) ** 0.5
    assert abs((numbers**4).mean() - 3) < 5 * (96 / count) ** 0.5


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_random_normal_is_finite_at_the_ends_of_the_uniform_numbers(monkeypatch, uniform):
    monkeypatch.setattr(randomness, "random_uniform", lambda key, indices, shape: torch.full((1, *shape), uniform))
    assert randomness.random_normal(0, torch.arange(1), (1,)).isfinite().all()


def test_seeded_generators_repeat_their_numbers():
    def draw():
        return float(torch.rand(())), random.random(), np.random.rand()

    randomness.seed_generators(2**32 - 1)
    expected = draw()
    assert draw() != expected
    randomness.seed_generators(2**32 - 1)
    assert draw() == expected
    generator, rng = torch.Generator().manual_seed(2**32 - 1), np.random.RandomState(2**32 - 1)
    assert expected == (float(torch.rand((), generator=generator)), random.Random(2**32 - 1).random(), rng.rand())


def test_each_gpu_of_a_process_has_its_own_random_numbers(monkeypatch):
    """nn.DataParallel's replicas draw their dropout on all GPUs; other processes have their own key."""
    gpus = tuple(torch.Generator() for _ in range(4))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert randomness.device_generators(fake_accelerator(device="cpu")) == []
    assert randomness.device_generators(fake_accelerator(2, device="cuda", kind="MULTI_GPU")) == [gpus[2]]
    draws = []
    for _ in range(2):
        randomness.seed_generators(7, randomness.device_generators(fake_accelerator(device="cuda")))
        draws.append([float(torch.rand((), generator=generator)) for generator in gpus])
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 4
    assert draws[0][0] == float(torch.rand((), generator=torch.Generator().manual_seed(7)))


def test_generators_go_on_as_if_nothing_was_drawn():
    random.gauss(0, 1)
    np.random.randn()  # each keeps a second number
    before = state()

    def fail():
        with items.generators_restored():
            randomness.seed_generators(3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert state() == before
