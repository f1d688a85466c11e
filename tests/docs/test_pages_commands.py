"""Every command on the pages and in the programs parses: the launcher's flags, the script's, and names of files."""

import os
import re
import shlex

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT
from pages import TEXTS, commands

COMMANDS = [command for text in TEXTS.values() for command in commands(text)]
for file in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
    if "__main__" in (source := file.read_text()):
        text = re.sub(r"\\\n *", "", source.split('"""')[1])
        COMMANDS += re.findall(r"^ *(accelerate launch .+)$", text, re.M) or [f"{file.name} names no command"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch):
    argv = shlex.split(command.rpartition("&&")[2])
    argv = [word for word in argv if not re.match(r"[A-Z_]+=", word)]
    monkeypatch.chdir(ROOT)
    if argv[1:2] == ["-m"]:
        assert argv[2] == "pytest" or os.path.isfile(argv[2].replace(".", "/") + "/__main__.py")
        return
    if argv[0] == "python" and os.path.isfile(f"{argv[1]}/__main__.py"):
        return
    if argv[0] in ("cp", "kubectl", "sky"):
        files = argv[1:-1] if argv[0] == "cp" else argv[-1:]
        assert all(os.path.exists(file) for file in files if file != "-R")
        return
    if argv[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(argv[1:])
        script, flags = options.training_script, options.training_script_args
    elif argv[0] == "sbatch":
        assert os.path.isfile(next(word for word in argv[1:] if not word.startswith("-")))
        script = next(word for word in argv if word.startswith("scripts/"))
        flags = argv[argv.index(script) + 1 :]
    elif argv[0] == "python":
        script, flags = argv[1], argv[2:]
    else:
        assert "accelerate" in argv[0]
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv[2:]))
        script, flags = options.training_script, options.training_script_args
    if script == "examples/own_metrics.py":
        pytest.importorskip("torchmetrics")
    module = __import__(script.removesuffix(".py").replace("/", "."), fromlist=["parse_args"])
    monkeypatch.setattr("sys.argv", [script, *flags])
    if flags or script != "examples/plain_accelerate.py":
        module.parse_args()
    assert os.path.isfile(script)


def test_the_readme_has_one_command_that_trains_and_one_that_tests_on_a_fresh_machine():
    blocks = re.findall(r"```bash\n(python3 -m venv .*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert ["mnist_mlp.py" in blocks[0], "-m pytest" in blocks[1]] == [True, True]
    assert all("pip install -r requirements.txt" in block for block in blocks)
    assert "-r tests/requirements.txt" in blocks[1]
