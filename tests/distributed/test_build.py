"""Models built without a process ever holding all of them: their numbers, and their memory."""

import json

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from fakes import fake_accelerator
from torch import nn

from tests.programs import builds
from utils.parallel import fsdp


def test_the_numbers_of_a_parameter_depend_on_the_seed_and_its_name():
    class Two(nn.Module):
        def __init__(self, *names):
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(5, 4) for name in names})

        def initialize(self, name, parameter):
            nn.init.normal_(parameter)

    both = fsdp.build(fake_accelerator(), lambda: Two("a", "b"), seed=7)
    torch.manual_seed(1)
    alone = fsdp.build(fake_accelerator(), lambda: Two("b"), seed=7)
    other = fsdp.build(fake_accelerator(), lambda: Two("b"), seed=8)
    assert torch.equal(both.layers["b"].weight, alone.layers["b"].weight)
    assert not torch.equal(both.layers["a"].weight, alone.layers["b"].weight)
    assert not torch.equal(other.layers["b"].weight, alone.layers["b"].weight)


def test_a_model_with_buffers_is_refused(capsys):
    with pytest.raises(SystemExit):
        fsdp.build(fake_accelerator(), lambda: nn.BatchNorm1d(3), seed=0)
    assert "cannot make a model with buffers, such as running_mean" in capsys.readouterr().err


@pytest.mark.slow
def test_shards_have_the_numbers_of_one_process_and_no_process_holds_the_model(launcher):
    expected = fsdp.build(fake_accelerator(), builds.make, seed=7)
    pretrained = fsdp.build(fake_accelerator(), builds.make, seed=3)
    file = launcher.folder / "weights.safetensors"
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in pretrained.state_dict().items()}, file)
    options = {"script": ROOT / "tests" / "programs" / "builds", "launch_flags": ["--num_processes", 3]}
    launcher("cpu_fsdp", "--output_dir", "built", **options)
    launcher("cpu_fsdp", "--output_dir", "loaded", "--pretrained", file, **options)
    for rank in range(3):
        built, loaded = (json.loads((launcher.folder / n / f"{rank}.json").read_text()) for n in ("built", "loaded"))
        assert built["digest"] == builds.whole(expected)
        assert loaded["digest"] == builds.whole(pretrained)
        assert built["is_tied"]
        assert built["peak_mib"] < 80  # of 150, of which a third is its shards
        assert loaded["peak_mib"] < 85
