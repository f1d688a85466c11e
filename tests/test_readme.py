"""Every command and link in the README files is real."""

import os
import re
import shlex

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.strip().splitlines()]


def test_the_two_commands_install_and_train_and_install_and_test():
    install = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/"
    train = "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py"
    assert COMMANDS[:2] == [install + train, install + "python -m pytest"]
    assert 'python" -m pytest' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch, capsys):
    words = shlex.split(command.rpartition("&&")[2])
    monkeypatch.chdir(ROOT)
    if "accelerate" in words[0]:
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
        script, flags = options.training_script, options.training_script_args
    elif words[1:3] == ["-m", "pytest"]:
        return
    else:
        script, flags = words[1], words[2:]
    module = __import__(f"scripts.{os.path.basename(script)[:-3]}", fromlist=["parse_args"])
    monkeypatch.setattr("sys.argv", [script, *flags])
    module.parse_args()
    assert os.path.isfile(script)


def test_python_examples_run(tmp_path, monkeypatch):
    import safetensors.torch
    import torch

    from scripts.mnist_mlp import MLP

    (tmp_path / "runs" / "mine").mkdir(parents=True)
    safetensors.torch.save_file(MLP(784, 256, 10).state_dict(), tmp_path / "runs" / "mine" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.zeros(3, 1, 28, 28, dtype=torch.uint8)}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, scope)
    assert scope["logits"].shape == (3, 10)


@pytest.mark.parametrize("page", ["README.md", "accelerate_configs/README.md", "benchmarks/RESULTS.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    for link in links:
        assert link.startswith("https://") or ((ROOT / page).parent / link).exists(), link


def test_every_script_and_config_is_in_the_readme():
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "accelerate_configs").glob("*.yaml")]:
        assert f"({path.relative_to(ROOT)})" in README
