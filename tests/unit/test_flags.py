"""Flags: numbers are checked, --help is complete, and fixed flags are known."""

import importlib
import re
import sys

import pytest
from conftest import ROOT

from utils.flags import ArgumentParser, at_least


def test_numbers_in_flags_are_checked(capsys):
    parser = ArgumentParser()
    parser.add_argument("--count", type=at_least(1))
    parser.add_argument("--share", type=at_least(0.0, float, below=1.0))
    parser.add_argument("--flip", type=at_least(0.0, float, most=1.0))
    assert parser.parse_args(["--count", "3", "--share", "0.5"]).count == 3
    assert parser.parse_args(["--flip", "1"]).flip == 1
    parser.add_run_flags(log_every=1)
    assert parser.parse_args(["--seed", str(2**32 - 1)]).seed == 2**32 - 1
    wrong = (
        ["--seed", str(2**32)],
        ["--count", "0"],
        ["--count", "x"],
        ["--share", "1"],
        ["--share", "nan"],
        ["--flip", "1.005"],
        ["--cou", "3"],
        ["--no"],
    )
    for words in wrong:
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1


def test_flags_of_a_fixed_group_are_named_in_the_namespace():
    parser = ArgumentParser()
    parser.add_argument_group("recipe", resume_invariant=True).add_argument("--lr", type=float)
    group = parser.add_argument_group("model", resume_invariant=True)
    group.add_mutually_exclusive_group().add_argument("--hidden-units", type=int)
    parser.add_argument_group("data").add_argument("--dataset")
    parser.add_run_flags(log_every=10)
    assert parser.parse_args([]).resume_invariants == ("seed", "lr", "hidden_units")
    assert parser.parse_known_args(["--other"])[0].resume_invariants == ("seed", "lr", "hidden_units")
    assert ArgumentParser().parse_args([]).resume_invariants == ()


def test_only_scripts_that_can_resume_get_the_flags_for_that(capsys):
    parser = ArgumentParser()
    parser.add_run_flags(log_every=10)
    args = parser.parse_args([])
    assert (args.save_best, args.patience, args.resume, args.log_every) == (None, 0, False, 10)
    args = parser.parse_args(["--save_best", "accuracy", "--patience", "3"])
    assert (args.save_best, args.patience) == ("accuracy", 3)
    with pytest.raises(SystemExit):
        parser.parse_args(["--patience", "-1"])
    parser = ArgumentParser()
    parser.add_run_flags()
    assert set(vars(parser.parse_args([]))) == {"seed", "output_dir", "timeout_s", "resume_invariants"}


PROGRAMS = [path for path in sorted((ROOT / "scripts").rglob("*.py")) if path.stem != "network_timing"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_has_each_flag_in_a_group_with_its_default_and_the_command(path, monkeypatch, capsys):
    name = path.relative_to(ROOT).with_suffix("")
    script = importlib.import_module(".".join(name.parts))
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    defaults = vars(script.parse_args())
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    assert ended.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    command = (
        r"  accelerate launch --config_file accelerate_configs/\w+.yaml (--num_processes \d+ )?"
        rf"{name}.py\b"
    )
    assert re.match(command, examples)
    assert "None" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines()[1:])) <= 80  # after the usage
    groups = dict(re.findall(r"(?m)^(\w[\w ]+):\n((?:  .*\n?)+)", text))
    assert len(groups) >= 3
    can_resume = defaults.get("resume") is not None
    for flag in ("--resume", "--profile", "--save_best", "--patience"):
        assert (flag in groups["run"]) == can_resume
    assert "--output_dir" in groups["run"]
    flags = re.findall(r"(?m)^  --(\w+)(.*\n(?: {10}.*\n)*)", text)
    assert {name for name, _ in flags} >= {"seed", "timeout_s"}
    assert set(defaults["resume_invariants"]) <= set(defaults)
    for name, rest in flags:
        assert len(rest.split()) > 2, name  # a word of help
        default = defaults[name]
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number and name != "profile":
            assert re.search(r"\(default:\s+[\d.e-]+\)", rest), name


# What may differ between a run and its resume: nothing in it decides the numbers. The length is
# compared as total_steps, the data by their fingerprint, and patience stops a run early.
FREE = {
    "checkpoint_every",
    "dataset",
    "deterministic",
    "gradient_accumulation_steps",
    "save_best",  # compared by Run
    "keep_checkpoints",
    "log_every",
    "log_with",
    "max_steps",
    "num_epochs",
    "output_dir",
    "patience",
    "profile",
    "resume",
    "timeout_s",
}
FREE_IN = {
    # virtual_processes and shuffle_window are compared by what the loader says of itself.
    "mnist_mlp": {"virtual_processes", "whole_gradients"},
    "gradient_accumulation": {"virtual_processes", "whole_gradients"},
    # compile is how the model is computed, as a dynamo_config of the config file.
    "resnet50": {
        *{"cache_dir", "compile", "max_test_samples", "num_workers", "preset", "shuffle_window", "virtual_processes"},
        *{"image_column", "label_column", "whole_gradients"},  # compared by the fingerprint of the data
    },
    "model_split": {
        *{"cpu_threads", "max_test_samples", "num_microbatches", "num_stages", "schedule", "split"},
    },
}


@pytest.mark.parametrize("name", FREE_IN)
def test_what_decides_the_numbers_is_fixed(name, monkeypatch):
    script = importlib.import_module(f"scripts.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    flags = vars(script.parse_args())
    free = flags.keys() - {"resume_invariants", *flags["resume_invariants"]}
    # Else: put the new flag into a group with resume_invariant=True, or in one of the lists above.
    assert free == FREE | FREE_IN[name]


def test_help_is_printed_once_a_machine(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "x")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            ArgumentParser("What it does.").parse_args(["--help"])
        assert ended.value.code == 0
        assert ("What it does." in capsys.readouterr().out) == printed
