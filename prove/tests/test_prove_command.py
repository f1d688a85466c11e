"""The command of prove_training, its reports, and its page of mistakes."""

import argparse
import ast
import json
import linecache
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from prove_training import command, imports, mistakes, proof, prove
from prove_training.recording import pretended_gpu
from prove_training.stages import Finding, Note
from tests.corpus import FOUND
from tests.foreign.mistakes import MISTAKES


@pytest.fixture
def crowded(tmp_path, monkeypatch):
    """A folder with modules that have the names of others, and a script that uses them; it says "accelerate", for which
    prove imports the library datasets. Returns the text of the script."""
    for name in ("queue", "mistakes", "text", "prove"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    (tmp_path / "utils.py").write_text("def lr():\n    return 1e-2\n")
    (tmp_path / "datasets.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "rates.py").write_text("MOMENTUM = 1.0\n")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "tests" / "foreign" / "ddp_series.py").read_text()
    imported = "import datasets  # to accelerate it\nimport torch\nimport utils\nfrom tests import rates\n"
    text = text.replace("import torch\n", imported, 1)
    return text.replace("lr=1e-2", "lr=utils.lr() * datasets.FACTOR * rates.MOMENTUM")


@pytest.mark.slow
def test_a_test_of_another_repository_gets_the_report(crowded):
    text = crowded.replace("loss.backward()", "(loss / int(os.environ['WORLD_SIZE'])).backward()")  # DDP divides, too
    Path("mine.py").write_text(text)
    said = prove("--processes", "2", "mine.py", "--batch_size", "16")
    assert said["code"] == 1
    finding = said["findings"][0]
    assert (finding["kind"], finding["stage"], finding["step"]) == ("factor", "gradient", 1)
    assert finding["line"] == "mine.py:56"


def started(*words: str, **variables) -> tuple[int, str]:
    """The exit code of a command, and the last line that it prints."""
    done = subprocess.run([sys.executable, *words], env=os.environ | variables, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_path_with_dots_is_no_reason_to_name_a_line_of_prove(crowded):
    divided = "loss = loss / int(os.environ['WORLD_SIZE'])\n        loss.backward()"
    Path("train.py").write_text(crowded.replace("loss.backward()", divided))
    code, verdict = started(os.path.relpath(ROOT), "--processes", "2", "train.py")
    assert (code, "between the loss and its backward pass at train.py:57" in verdict) == (1, True)


@pytest.mark.slow
def test_a_module_is_started_by_its_name_and_has_a_relative_idea_of_its_neighbours(crowded):
    Path("package").mkdir()
    Path("package", "rates.py").write_text("def lr():\n    return 1e-2\n")
    Path("package", "train.py").write_text(crowded.replace("import utils\n", "from . import rates as utils\n"))
    words = ("-m", "prove_training", "--processes", "2", "-m", "package.train")
    code, verdict = started(*words, PYTHONPATH=str(ROOT))
    assert (code, verdict.partition(":")[0]) == (0, "proven")


@pytest.mark.slow
def test_the_action_installs_it_and_judges_a_script(tmp_path):
    """Its steps as they stand in action.yml; the package goes into a folder of this test."""
    (tmp_path / "train.py").write_text((ROOT / "tests" / "foreign" / "ddp_series.py").read_text())
    left_out = shutil.ignore_patterns("silent_bugs", "tests", "build", "*.egg-info")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_out)  # which pip builds in
    installed = tmp_path / "installed"
    variables = {"GITHUB_ACTION_PATH": str(checkout), "FLAGS": "--processes 2", "SCRIPT": "train.py"}
    variables |= {"PIP_TARGET": str(installed), "PIP_NO_DEPS": "1", "PYTHONPATH": str(installed)}
    variables |= {"PIP_NO_BUILD_ISOLATION": "0"}  # 0 switches it off: this environment's setuptools, and no network
    folders = [str(installed / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    variables |= {"PATH": os.pathsep.join(folders)}
    for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]:
        words = ["bash", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "\nproven: " in done.stdout
    names = {path.name for path in installed.iterdir() if not path.name.endswith("-info")}
    assert names == {"bin", "prove_training"}


def test_it_imports_nothing_of_this_repository():
    for path in (ROOT / "prove_training").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"utils", "tools", "scripts", "tests"}, path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--processes", "1", __file__], "--processes: 1: numbers of processes to compare with one, such as 2 or 2,3"),
        (["--processes", "two", __file__], "--processes: two: numbers of processes"),
        (["--processes", "", __file__], "numbers of processes to compare with one"),
        (["--format", "xml", __file__], "invalid choice: 'xml'"),
        (["train.ipynb"], "train.ipynb is a notebook: jupyter nbconvert --to script makes a script of it"),
    ],
)
def test_bad_flags_are_an_error(words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.parse_args(words)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def reported(tmp_path, monkeypatch, output: str, source: str = "loss.backward()") -> proof.Report:
    """A report of one finding and one note of train.py:1."""
    (tmp_path / "train.py").write_text(f"{source}\n")
    monkeypatch.chdir(tmp_path)
    linecache.checkcache()
    report = proof.Report(argparse.Namespace(script=Path("train.py"), format=output))
    report.add("2 processes", [Finding("factor", "gradient", "0.5 times: 50 %", 1, "train.py:1")])
    report.add("", [Note("samples", "repeats 1 sample", None, "")])
    return report


def test_a_finding_that_is_meant_is_a_note(tmp_path, monkeypatch):
    assert [each.kind for each in reported(tmp_path, monkeypatch, "json").findings] == ["factor"]
    ignored = reported(tmp_path, monkeypatch, "json", "loss.backward()  # prove: ignore[factor] by design")
    assert ignored.findings == []
    assert "0.5 times: 50 % [factor, ignored]" in ignored.notes[0].message
    other = reported(tmp_path, monkeypatch, "json", "loss.backward()  # prove: ignore[gradient]")
    assert [each.kind for each in other.findings] == ["factor"]


def test_github_gets_an_annotation_for_each_finding_and_note_and_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert reported(tmp_path, monkeypatch, "github").end(1, "wrong: 0.5 times") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  2 processes   WRONG in step 1, gradient, train.py:1: 0.5 times: 50 % [factor]" in lines
    error, notice = lines[-2:]
    assert error.startswith("::error file=train.py,line=1,title=prove factor::0.5 times: 50 %25: Distributed")
    assert notice == "::notice title=prove note::repeats 1 sample"
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### wrong: 0.5 times\n")
    assert "[factor]" in summary
    report = proof.Report(argparse.Namespace(script=Path("train.py"), format="github"))
    report.end(3, "cannot tell: a\nb")
    assert capsys.readouterr().out.splitlines()[-1] == "::error title=prove::cannot tell: a%0Ab"


def test_sarif_has_the_place_and_the_id_of_each_finding(tmp_path, monkeypatch, capsys):
    reported(tmp_path, monkeypatch, "sarif").end(1, "wrong: 0.5 times")
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (finding, noted) = run["results"]
    assert (finding["ruleId"], finding["level"], noted["level"]) == ("factor", "error", "note")
    place = finding["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 1)
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"factor", "note"}


def test_a_closed_pipe_ends_the_command_without_a_traceback(monkeypatch):
    monkeypatch.setattr(command, "parse_args", lambda: argparse.Namespace(module=None, script=Path(__file__)))
    monkeypatch.setattr(imports, "load", lambda *_: True)
    monkeypatch.setattr(command.os, "dup2", lambda *_: None)

    def closed(args):
        raise BrokenPipeError

    monkeypatch.setattr(proof, "prove", closed)
    assert command.main() == 141


def test_the_interpreter_of_the_project_is_used_where_pytorch_is_not_installed(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(command.os, "execv", lambda python, words: started.append((str(python), words)))
    assert command.with_other_python() == 2
    assert started == []
    assert "PyTorch is not installed here" in capsys.readouterr().err
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("")
    command.with_other_python()
    ((python, words),) = started
    assert (python, words[1:]) == (".venv/bin/python", [str(ROOT / "prove_training"), *sys.argv[1:]])


def test_the_figures_of_a_pretended_gpu_are_small_and_none_is_zero():
    assert all(pretended_gpu.ANSWERS[name] == 1 for name in pretended_gpu.NUMBERS)
    assert pretended_gpu.ANSWERS["current_device"] == 0
    assert pretended_gpu.ANSWERS["memory_stats"]["allocated_bytes.all.peak"] == 1
    assert pretended_gpu.Finished().elapsed_time(pretended_gpu.Finished()) > 0


def nodes_of_the_code() -> list[ast.AST]:
    files = (ROOT / "prove_training").rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


def strings_in(nodes) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def kinds_in_the_code() -> set[str]:
    """The kinds of findings that are written in prove_training."""
    nodes = nodes_of_the_code()
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"]
    return {word for call in calls for word in strings_in(ast.walk(call.args[0])) if word}


def test_every_mistake_has_its_section_with_wrong_and_right_lines_and_a_thread():
    sections, index = mistakes.sections(), mistakes.PAGE.read_text().partition("\n## ")[0]
    assert all(f"[{heading}](#{heading})" in index and mistakes.advice(heading) for heading in sections)
    assert {mistakes.id_of(kind) for kind in kinds_in_the_code()} <= sections.keys()
    assert sections.keys() <= {mistakes.id_of(word) for word in strings_in(nodes_of_the_code())}, "nothing names it"
    for mistake in filter(lambda mistake: mistake.kind, MISTAKES.values()):
        assert mistake.thread.rpartition("/")[2] in sections[mistake.kind.replace("_", "-")], mistake.thread
    kinds = {mistake.kind for mistake in MISTAKES.values() if mistake.kind} | {*FOUND.values()}
    for kind in kinds - {"hangs", "gradient"}:  # which have no one correction
        text = sections[mistakes.id_of(kind)]
        assert "\n-" in text or "\n+" in text, f"no lines in {kind}"
        assert {line[0] for line in mistakes.correction(kind)} & {"-", "+"}


def test_advice_is_given_in_the_terms_of_the_framework():
    assert "prepare" in mistakes.advice("all_the_data")
    assert "TrainingArguments" in mistakes.advice("schedule", "Trainer")
    assert mistakes.advice("schedule", "Lightning") == mistakes.advice("schedule")
    for framework in mistakes.FRAMEWORKS:
        assert any(mistakes.advice(heading, framework) != mistakes.advice(heading) for heading in mistakes.sections())
