"""Who prints, how a process ends with one sentence, and that importing has no side effect."""

import io
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from utils.console import is_local_main, report_to_launcher, show, stop


@pytest.fixture
def environment(monkeypatch):
    def set_only(**variables):
        for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    set_only()
    return set_only


@pytest.mark.parametrize(
    ("variables", "prints"),
    [
        ({}, True),
        ({"LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x"}, True),
        ({"LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "x"}, False),
        ({"LOCAL_RANK": 1, "WORLD_SIZE": 2}, True),
        ({"LOCAL_RANK": 1}, True),  # left over in the environment: no launcher, no other process
        ({"LOCAL_RANK": 1, "WORLD_SIZE": 1, "MASTER_ADDR": "x"}, True),
    ],
)
def test_one_process_of_a_machine_prints(environment, variables, prints):
    environment(**variables)
    assert is_local_main() == prints


def test_an_error_is_printed_once_a_machine_unless_the_process_is_alone(environment, capsys):
    for rank, alone, expected in ((0, False, "error: so\n"), (1, False, ""), (1, True, "error: so\n")):
        environment(LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="x")
        with pytest.raises(SystemExit) as ended:
            stop("so", alone=alone)
        assert ended.value.code == 2
        assert capsys.readouterr().err == expected


def test_every_rank_hands_its_error_to_the_launcher(environment, tmp_path):
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        environment(LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="x", TORCHELASTIC_ERROR_FILE=path)
        with pytest.raises(SystemExit):
            stop("so")
        message = json.loads(path.read_text())["message"]
        assert message["message"] == message["extraInfo"]["py_callstack"] == "error: so"
        assert int(message["extraInfo"]["timestamp"]) > 0
    environment(TORCHELASTIC_ERROR_FILE=tmp_path / "no folder" / "error.json")
    report_to_launcher("so")  # raises nothing
    environment()
    report_to_launcher("so")


LOST_READER = ROOT / "tests" / "programs" / "lost_reader.py"


def test_a_reader_that_goes_ends_the_output_and_not_the_process():
    """As `| head -1` does. The exit code stays; without the mend it is 120, or a traceback."""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that a flush meets the closed pipe too
    process = subprocess.Popen([sys.executable, LOST_READER], text=True, env=buffered, **pipes)
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 7
    assert said == "warning: the run goes on without output: Broken pipe\n"


def test_a_full_disk_ends_the_output_and_not_the_process():
    words = ["bash", "-c", '"$0" "$1" >/dev/full </dev/null', sys.executable, LOST_READER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert done.stderr == "warning: the run goes on without output: No space left on device\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    show("a\tb\nc \N{SNOWMAN} \x1b[31m \r \x9b \udcff")
    assert capsys.readouterr().out == "a\tb\nc \N{SNOWMAN} \\x1b[31m \\r \\x9b \\udcff\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for no_color, file, expected in (
        ("", io.StringIO(), "error: so\n"),
        ("", Terminal(), "\033[1;31merror:\033[0m so\n"),
        ("1", Terminal(), "error: so\n"),
    ):
        monkeypatch.setenv("NO_COLOR", no_color)
        show("error: so", file)
        assert file.getvalue() == expected


@pytest.mark.slow
def test_importing_any_module_of_utils_changes_nothing():
    program = ROOT / "tests" / "programs" / "import_all.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "imported all\n", done.stderr[-2000:]
