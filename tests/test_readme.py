"""Every command, link, test and loop in the README files is real."""

import os
import re
import shlex
import sys

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT, free_port

PAGES = ["README.md", "scripts/README.md", "accelerate_configs/README.md", "benchmarks/RESULTS.md"]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
README = TEXTS["README.md"]
LOOPS = re.search(r"## One loop, four ways\n(.*?)\n## ", README, re.S)[1]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


COMMANDS = [
    line
    for text in TEXTS.values()
    for block in blocks(text, "bash")
    for line in re.sub(r"\\\n\s*", "", block).strip().splitlines()
]


def test_the_two_commands_install_and_train_and_install_and_test():
    install = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/"
    train = "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py"
    assert COMMANDS[:2] == [install + train, install + "python -m pytest"]
    assert 'python" -m pytest' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch, capsys):
    words = [word for word in shlex.split(command.rpartition("&&")[2]) if not re.match(r"[A-Z_]+=", word)]
    monkeypatch.chdir(ROOT)
    if words[1:2] == ["-m"]:
        assert words[2] in ("pytest", "utils.doctor")
        return
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        script, flags = options.training_script, options.training_script_args
    elif words[0] == "sbatch":
        assert os.path.isfile(next(word for word in words[1:] if not word.startswith("-")))
        script = next(word for word in words if word.startswith("scripts/"))
        flags = words[words.index(script) + 1 :]
    elif "accelerate" in words[0]:
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        script, flags = options.training_script, options.training_script_args
    else:
        script, flags = words[1], words[2:]
    module = __import__(f"{os.path.dirname(script)}.{os.path.basename(script)[:-3]}", fromlist=["parse_args"])
    monkeypatch.setattr("sys.argv", [script, *flags])
    module.parse_args()
    assert os.path.isfile(script)


def test_the_saved_model_is_loaded_as_it_says(tmp_path, monkeypatch):
    import safetensors.torch

    from scripts.mnist_mlp import MLP, parse_args

    monkeypatch.setattr(sys, "argv", ["mnist_mlp.py"])
    model = MLP(784, parse_args().hidden, 10)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "runs" / "mine" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.zeros(3, 1, 28, 28, dtype=torch.uint8)}
    for block in blocks(README.replace(LOOPS, ""), "python"):
        exec(block, scope)
    assert scope["logits"].shape == (3, 10)


def test_one_loop_four_ways(monkeypatch):
    """They end with the same weights: the data are one batch, so that the order of the samples does not count."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    images = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    weights = []

    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.Linear(8, 3))

    for block in blocks(LOOPS, "python"):
        scope = {
            **{"torch": torch, "nn": torch.nn, "dist": torch.distributed, "make_model": make_model},
            **{"cross_entropy": torch.nn.functional.cross_entropy, "Accelerator": Accelerator},
            **{"DataLoader": DataLoader, "DistributedSampler": DistributedSampler},
            **{"DistributedDataParallel": DistributedDataParallel, "DataLoaderConfiguration": DataLoaderConfiguration},
            "data": TensorDataset(images, torch.arange(200) % 3),
        }
        try:
            exec(block, scope)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
                for name in ("RANK", "WORLD_SIZE"):  # Accelerate would start another group
                    monkeypatch.delenv(name)
        weights.append(torch.cat([weight.detach().flatten().cpu() for weight in scope["model"].parameters()]))
    start = torch.cat([weight.detach().flatten() for weight in make_model().parameters()])
    assert len(weights) == 4
    for other in weights:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)
        assert (other - start).abs().max() > 1e-3


@pytest.mark.parametrize("page", PAGES)
def test_links_and_tests_that_it_names_are_there(page):
    for link in re.findall(r"\]\(([^)#]+)\)", TEXTS[page]):
        assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), link
    for name, file in re.findall(r"`(test_\w+)` in \[\w+\]\(([^)]+)\)", TEXTS[page]):
        assert f"def {name}(" in ((ROOT / page).parent / file).read_text(), name


def test_every_script_and_config_is_in_the_readme():
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({path.relative_to(ROOT)})" in README
    for path in (ROOT / "utils").glob("[a-z]*.py"):
        assert f"(utils/{path.name})" in README, path
    assert len(re.findall(r"`test_\w+` in \[", README)) >= 15
