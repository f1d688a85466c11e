"""Every command, link, test, loop and diff in the README files is real."""

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import run_many
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT, free_port
from PIL import Image

from benchmarks import run
from utils import take

PAGES = ["README.md", "scripts/README.md", "accelerate_configs/README.md", "benchmarks/RESULTS.md"]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
README = TEXTS["README.md"]
SCRIPTS = TEXTS["scripts/README.md"]


def section(text, title):
    return re.search(rf"## {title}\n(.*?)\n## ", text, re.S)[1]


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(text):
    found = []
    for block in blocks(text, "bash"):
        found += re.sub(r"\\\n\s*", "", block).strip().splitlines()
    return found


COMMANDS = [command for text in TEXTS.values() for command in commands(text)]


def test_the_two_commands_install_and_train_and_install_and_test():
    install = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/"
    train = "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py"
    assert COMMANDS[:2] == [install + train, install + "python -m pytest"]
    assert 'python" -m pytest' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch, capsys):
    words = shlex.split(command.rpartition("&&")[2])
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    monkeypatch.chdir(ROOT)
    if words[1:2] == ["-m"]:
        programs = [*take.commands(), "take"]
        package, _, name = words[2].partition(".")
        assert words[2] == "pytest" or (package == "utils" and name in programs)
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
    folder, file = os.path.split(script)
    module = __import__(f"{folder}.{file[:-3]}", fromlist=["parse_args"])
    monkeypatch.setattr("sys.argv", [script, *flags])
    module.parse_args()
    assert os.path.isfile(script)


@pytest.fixture(scope="module")
def own_program(tmp_path_factory):
    """mnist_mlp.py, taken as the README says and changed by its diff, and images to train on.

    Each hunk must fit, and in one place only.
    """
    folder = tmp_path_factory.mktemp("mine")
    (command,) = [command for command in commands(README) if "utils.take" in command]
    _, _, _, script, to = shlex.split(command)
    assert to == "../mine"
    # Another name than in the README: its modules must not be those of another test's copy.
    words = [sys.executable, "-m", "utils.take", script, folder, "--package", "own_cnn_tools"]
    subprocess.run(list(map(str, words)), cwd=ROOT, check=True, capture_output=True, timeout=60)
    program = folder / f"{script}.py"
    text = program.read_text().replace("own_cnn_tools", "train_utils")
    (diff,) = blocks(README, "diff")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        assert f"\n{text}".count(f"\n{old}") == 1, hunk
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    program.write_text(text.replace("train_utils", "own_cnn_tools"))

    stripes = 255 * (np.arange(40) // 4 % 2)
    noise = np.random.default_rng(0)
    for split, count in (("train", 21), ("test", 8)):
        for name in ("across", "down"):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                image = np.broadcast_to(stripes, (40, 40))
                image = image if name == "down" else image.T
                image = 0.8 * image + noise.integers(50, size=(40, 40))
                file = folder / "photos" / split / name / f"{number}.png"
                Image.fromarray(image.astype(np.uint8)).save(file)
    return program


def own_flags(program, run):
    flags = ["--dataset", program.parent / "photos", "--output_dir", run, "--batch_size", 12]
    return [*flags, "--max_steps", 2, "--log_every", 1, "--dropout", 0.1]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def test_the_diff_makes_a_program_that_trains_and_predicts(own_program, tmp_path, capsys):
    assert run_many.run(str(own_program), own_flags(own_program, tmp_path / "run")) is None
    assert "test  epoch 1  step 2/2" in capsys.readouterr().out
    assert len(losses(tmp_path / "run")) == 3
    image = own_program.parent / "photos" / "test" / "down" / "0.png"
    run_many.run(str(own_program), ["--output_dir", tmp_path / "run", "--predict", image])
    assert re.fullmatch(rf"{image}: [01] \(\d+\.\d%\)\n", capsys.readouterr().out)


@pytest.mark.slow
def test_the_program_of_the_diff_has_the_same_losses_on_two_processes(own_program, shared_launcher):
    for config in ("cpu", "cpu_ddp"):
        flags = own_flags(own_program, shared_launcher.folder / config)
        shared_launcher(config, *flags, script=own_program.with_suffix(""))
    one, two = (losses(shared_launcher.folder / config) for config in ("cpu", "cpu_ddp"))
    assert two == pytest.approx(one, rel=1e-6)


def test_the_saved_model_is_loaded_as_it_says(tmp_path, monkeypatch):
    import safetensors.torch

    from scripts.mnist_mlp import MLP, parse_args

    monkeypatch.setattr(sys, "argv", ["mnist_mlp.py"])
    model = MLP(784, parse_args().hidden, 10)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    scope = {"images": torch.zeros(3, 1, 28, 28, dtype=torch.uint8)}
    for block in blocks(section(SCRIPTS, "Use the model"), "python"):
        exec(block, scope)
    assert scope["logits"].shape == (3, 10)


def test_one_loop_four_ways(monkeypatch):
    """They end with the same weights: one batch has all the data, so the order does not matter."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    group = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**group, **address}.items():
        monkeypatch.setenv(name, str(value))
    images = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    weights = []

    def make_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.Linear(8, 3))

    def flat(model):
        return torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])

    for block in blocks(section(SCRIPTS, "One loop, four ways"), "python"):
        scope = {
            "os": os,
            "torch": torch,
            "nn": torch.nn,
            "dist": torch.distributed,
            "cross_entropy": torch.nn.functional.cross_entropy,
            "DistributedDataParallel": DistributedDataParallel,
            "DataLoader": DataLoader,
            "DistributedSampler": DistributedSampler,
            "Accelerator": Accelerator,
            "DataLoaderConfiguration": DataLoaderConfiguration,
            "make_model": make_model,
            "data": TensorDataset(images, torch.arange(200) % 3),
        }
        try:
            exec(block, scope)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
                for name in group:  # Accelerate would start another group
                    monkeypatch.delenv(name)
        weights.append(flat(scope["model"]))
    start = flat(make_model())
    assert len(weights) == 4
    for other in weights:
        torch.testing.assert_close(other, weights[0], rtol=1e-4, atol=1e-5)
        assert (other - start).abs().max() > 1e-3


@pytest.mark.parametrize("page", PAGES)
def test_links_and_tests_that_it_names_are_there(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        assert not path or (folder / path).exists(), link
        if heading:
            target = (folder / path if path else ROOT / page).read_text()
            titles = re.findall(r"^#+ (.+)$", target, re.M)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert heading in anchors, link
    for name, file in re.findall(r"`(test_\w+)` in \[\w+\]\(([^)]+)\)", TEXTS[page]):
        assert f"def {name}(" in (folder / file).read_text(), name


def test_every_script_config_and_module_is_in_the_readme():
    paths = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "accelerate_configs").glob("*.yaml")]
    for path in paths:
        assert f"({path.relative_to(ROOT)})" in README, path
    for path in (ROOT / "utils").glob("[a-z]*.py"):
        assert f"(../utils/{path.name})" in SCRIPTS, path


def test_tables_of_the_pipeline_are_those_that_were_recorded():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    page = section(SCRIPTS, "One model over several devices")
    for name in ("model_split", "model_split_exact"):
        (table,) = run.report(name, results[name]).tables
        assert table.rpartition("\n\n")[2] in page, f"{name}: copy the table from RESULTS.md"
    schedules = {schedule for _, schedule, _ in results["model_split_exact"]["measured"]}
    assert schedules == {"naive", "gpipe", "1f1b", "interleaved"}
    unsplit = {m: rate for m, rate, *_ in results["model_split"]["measured"]["speed"]}
    split = {m: rate for m, _, rate, _ in results["model_split"]["measured"]["speed"]}
    fastest = max(split, key=split.get)
    words = " ".join(page.split())
    assert f"at m = 8 the unsplit model has {unsplit[8] / unsplit[1]:.2f} times" in words
    assert f"The fastest is m = {fastest}, with {split[fastest] / unsplit[1]:.2f} times" in words


def test_each_common_mistake_has_its_test():
    rows = section(README, "Common mistakes, and the test for each").strip().splitlines()[2:]
    assert len(rows) >= 15
    for row in rows:
        assert re.search(r"`test_\w+` in \[\w+\]\(tests/\w+\.py\) \|$", row), row


def test_each_word_of_the_glossary_has_its_line():
    """One line of the named file, and of code: the line alone could stand in a comment."""
    text = SCRIPTS.partition("\n## Words\n")[2]
    words = set()
    for row in re.findall(r"^\|.+\|$", text, re.M):
        if row.startswith(("| word |", "| --- |")):
            continue
        word, line, file = re.fullmatch(r"\| ([^|]+) \|[^|]+\| `([^`]+)` in \[[\w.]+\]\(([^)]+)\) \|", row).groups()
        words.update(word.split(", "))
        lines = (ROOT / "scripts" / file).read_text().splitlines()
        found = [each for each in lines if line in each.partition("#")[0]]
        assert found, row
    assert words >= WORDS, WORDS - words


# What posts about DataParallel and DistributedDataParallel explain.
WORDS = {
    *("process group", "rank", "local rank", "world size", "master", "replica", "bucket"),
    *("collective", "point to point", "broadcast", "reduce", "all-reduce", "gather", "scatter"),
    *("vertical scaling", "horizontal scaling", "data parallelism", "model parallelism"),
    *("computational graph", "synchronous step", "asynchronous step", "GIL"),
}
