"""Accumulation with two models: what guides/two_models.md says of the wrong and the right loop."""

import copy
import re
import textwrap

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from conftest import ROOT
from torch.nn import functional as F

from examples import gan

TEXT = (ROOT / "guides" / "two_models.md").read_text()
WRONG, RIGHT = re.findall(r"```python\n# (?:wrong|right)\n(.*?)```", TEXT, re.S)
UPDATES, BATCH = 3, 8


class Batch:
    """Some of the samples of a step, as GlobalLoader gives them."""

    def __init__(self, real, noise, k):
        self.data, self.noise, self.k = (real,), noise, k

    def __len__(self):
        return len(self.noise)

    def randn(self, size):
        return self.noise

    def mean_loss(self, losses):
        return losses.sum() * self.k / BATCH


@pytest.fixture
def train(monkeypatch):
    """The weights of both models after three steps, in k micro-batches each."""
    torch.manual_seed(0)
    models = gan.make_mlp(gan.LATENT, 2).double(), gan.make_mlp(2, 1).double()
    reals = torch.randn(UPDATES, BATCH, 2, dtype=torch.float64)
    noises = torch.randn(UPDATES, BATCH, gan.LATENT, dtype=torch.float64)

    def train(program, k):
        plugin = GradientAccumulationPlugin(num_steps=k, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        generator, discriminator = copy.deepcopy(models)
        g_optimizer = torch.optim.Adam(generator.parameters(), 0.01)
        d_optimizer = torch.optim.Adam(discriminator.parameters(), 0.02)
        prepared = accelerator.prepare(generator, discriminator, g_optimizer, d_optimizer)
        names = ("generator", "discriminator", "g_optimizer", "d_optimizer")
        scope = dict(zip(names, prepared, strict=True)) | {"torch": torch, "F": F}
        scope |= {"accelerator": accelerator, "LATENT": gan.LATENT}
        scope["bare_discriminator"] = discriminator
        scope["generator_parameters"] = list(generator.parameters())
        parts = []
        for real, noise in zip(reals, noises, strict=True):
            parts += zip(real.chunk(k), noise.chunk(k), strict=True)
        if "micro_batches" in program:
            exec(program, scope | {"micro_batches": parts})
        else:
            for real, noise in parts:
                exec(program, scope | {"real": real, "batch": Batch(real, noise, k)})
        flat = torch.nn.utils.parameters_to_vector
        return flat(generator.parameters()).detach(), flat(discriminator.parameters()).detach()

    return train


def largest_difference(one, other):
    return [(a - b).abs().max().item() for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("k", [2, 4])
def test_the_wrong_loop_depends_on_accumulation_and_the_right_one_does_not(train, k):
    assert min(largest_difference(train(WRONG, k), train(WRONG, 1))) > 1e-3
    assert max(largest_difference(train(RIGHT, k), train(RIGHT, 1))) < 1e-12


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (", inputs=generator_parameters", ""),
        # The discriminator's step before the generator's loss.
        ("    g_losses =", "    d_optimizer.step()\n    d_optimizer.zero_grad()\n    g_losses ="),
    ],
)
def test_each_line_of_the_right_loop_is_needed(train, line, instead):
    assert RIGHT.count(line) == 1
    changed = RIGHT.replace(line, instead)
    assert max(largest_difference(train(changed, 2), train(RIGHT, 1))) > 1e-3


def test_the_right_loop_is_in_the_program():
    program = (ROOT / "examples" / "gan.py").read_text()
    assert textwrap.indent(RIGHT, 12 * " ") in program
