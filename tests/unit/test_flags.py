"""Flags: numbers are checked, --help is complete, and fixed flags are known."""

import argparse
import importlib
import re
import sys

import pytest
from conftest import ROOT

from utils.flags import MAY_CHANGE, ArgumentParser, at_least, with_defaults


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


def test_flags_of_a_group_that_may_change_are_named_in_the_namespace():
    parser = ArgumentParser()
    parser.add_argument_group("recipe").add_argument("--lr", type=float)
    group = parser.add_argument_group("sampling", may_change=True)
    group.add_argument("--prompt")
    group.add_mutually_exclusive_group().add_argument("--top-k", type=int)
    parser.add_run_flags(log_every=10)
    assert parser.parse_args([]).may_change == ["prompt", "top_k"]
    assert parser.parse_known_args(["--other"])[0].may_change == ["prompt", "top_k"]
    assert with_defaults(argparse.Namespace(lr=0.1)).may_change == []


def test_only_scripts_that_can_resume_get_the_flags_for_that():
    parser = ArgumentParser()
    parser.add_run_flags(log_every=10)
    args = parser.parse_args([])
    assert (args.save_best, args.patience, args.resume, args.log_every) == (None, 0, False, 10)
    args = parser.parse_args(["--save_best", "max:accuracy", "--patience", "3"])
    assert (args.save_best, args.patience) == ("max:accuracy", 3)
    with pytest.raises(SystemExit):
        parser.parse_args(["--patience", "-1"])
    parser = ArgumentParser()
    parser.add_run_flags()
    assert set(vars(parser.parse_args([]))) == {"seed", "output_dir", "timeout_s", "may_change"}


def test_an_output_folder_in_the_home_folder(monkeypatch):
    parser = ArgumentParser()
    parser.add_run_flags()
    monkeypatch.setenv("HOME", "/home/me")
    assert parser.parse_args(["--output_dir=~/runs/x"]).output_dir == "/home/me/runs/x"
    assert parser.parse_args([]).output_dir is None


HELPERS = {"network_timing", "pictures"}
PROGRAMS = [path for path in sorted((ROOT / "scripts").rglob("*.py")) if path.stem not in HELPERS]


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
    for flag in ("--resume", "--save_best", "--patience"):
        assert (flag in groups["run"]) == can_resume
    assert "--output_dir" in groups["run"]
    flags = re.findall(r"(?m)^  --(\w+)(.*\n(?: {10}.*\n)*)", text)
    assert {name for name, _ in flags} >= {"seed", "timeout_s"}
    for name, rest in flags:
        assert len(rest.split()) > 2, name  # a word of help
        default = defaults[name]
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number:
            assert re.search(r"\(default:\s+[\d.e-]+\)", rest), name


def test_of_the_run_flags_those_that_decide_numbers_must_be_the_same_when_resuming():
    parser = ArgumentParser()
    parser.add_run_flags(log_every=10)
    flags = set(vars(parser.parse_args([])))
    assert flags - MAY_CHANGE == {"seed", "save_best", "virtual_processes"}
    assert MAY_CHANGE - flags == {"dataset", "cache_dir", "num_workers", "gradient_accumulation_steps"}
