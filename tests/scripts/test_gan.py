"""Accumulation with two models: what guides/two_models.md says of the wrong and the right loop."""

import copy
import textwrap

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from conftest import ROOT
from fakes import fake_accelerator
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from examples import gan
from tests.docs.pages import blocks, guide
from utils.loader import Batch, GlobalLoader

WRONG, RIGHT = (block.partition("\n")[2] for block in blocks(guide("two_models"), "python"))
UPDATES, BATCH = 3, 8


@pytest.fixture
def train(monkeypatch):
    """The weights of both models after three steps, in k micro-batches each."""
    torch.manual_seed(0)
    models = gan.make_mlp(gan.LATENT, 2).double(), gan.make_mlp(2, 1).double()
    data = TensorDataset(torch.randn(UPDATES * BATCH, 2, dtype=torch.float64))
    randn = Batch.randn
    monkeypatch.setattr(Batch, "randn", lambda *args: randn(*args).double())

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
        batches = list(GlobalLoader(data, BATCH, fake_accelerator(accumulation=k), seed=0))
        if "micro_batches" in program:
            exec(program, scope | {"micro_batches": [(batch.data[0], batch.randn(gan.LATENT)) for batch in batches]})
        else:
            for batch in batches:
                exec(program, scope | {"real": batch.data[0], "batch": batch})
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
