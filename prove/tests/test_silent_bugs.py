"""silent_bugs: each program is what its page says, and the runner finds one that is not."""

import ast
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from prove_training import mistakes
from silent_bugs import run
from tests.corpus import FOUND

CORPUS = ROOT / "silent_bugs"
CASES = run.find_cases(["bugs", "right"])
IMPORTED = {"torch", "accelerate"}
TOOL = """
import sys
script = sys.argv[1]
lines = open(script).read().splitlines()
wrong = [number for number, line in enumerate(lines, 1) if "# WRONG" in line]
if wrong and "--fixed" not in sys.argv:
    sys.exit(f"wrong: {script}:{wrong[0] + FAR}") if MESSAGE else sys.exit(1)
sys.exit("right" if ACCUSES else 0)
"""


def test_there_are_more_than_a_hundred_bugs_and_forty_right_programs():
    bugs = [case for case in CASES if case.is_bug]
    assert len(bugs) >= 100
    assert len(CASES) - len(bugs) >= 40
    assert len({case.path.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_is_short_and_says_what_it_is(case):
    text = case.path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 60
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names} <= IMPORTED
    about = ast.get_docstring(tree)
    assert about
    assert case.is_bug == ("FIXED = " in text) == bool(case.wrong_lines)
    if case.is_bug:
        assert "\nIts number: " in about
        assert re.search(r"^https://github\.com/[\w.-]+/[\w.-]+", about, re.M)


def test_the_unseen_programs_say_what_they_are_and_have_a_row_each():
    cases = run.find_cases(["unseen"])
    page = (CORPUS / "unseen" / "README.md").read_text()
    rows = re.findall(r"^\| (unseen/[\w/]+) \|", page, re.M)
    assert sorted(rows) == sorted(case.name for case in cases)
    assert (sum(case.is_bug for case in cases), sum(not case.is_bug for case in cases)) == (26, 14)
    first, _, later = page.partition("\n## Ten more\n")
    for case in cases:
        entry = run.index_of(case)
        assert case.is_bug == bool(case.wrong_lines) == bool(entry["number"])
        assert len(case.path.read_text().splitlines()) <= 70
        assert bool(entry["threads"]) == (f"| {case.name} |" in later)
    found = re.findall(r"^\| unseen/bugs/\w+ \| \*\*wrong", first, re.M)
    assert f"{len(found)} of 20 bugs found" in first


def test_the_page_has_a_row_for_each_program():
    page = (CORPUS / "README.md").read_text()
    rows = re.findall(r"^\| ([\w/]+) \|", page, re.M)
    assert sorted(name for name in rows if "/" in name) == sorted(case.name for case in CASES)
    bugs = sum(case.is_bug for case in CASES)
    assert f"{bugs} bugs" in page
    found = re.findall(r"^\| (bugs/[\w/]+) \| [^|]+ \| \*\*wrong", page, re.M)
    assert sorted(found) == sorted(FOUND)
    assert f"{len(FOUND)} of {bugs} bugs" in " ".join(page.split())
    assert f"{len(FOUND)} of the {bugs} bugs" in (ROOT / "README.md").read_text()
    assert f"{sum(not case.is_bug for case in CASES)} right programs" in page


def test_each_correction_names_its_advice_and_has_a_row():
    rows = json.loads((CORPUS / "self_repair.json").read_text())
    diffs = {case.name: case.path.with_suffix(".diff") for case in CASES}
    assert [row["name"] for row in rows] == sorted(name for name, diff in diffs.items() if diff.exists())
    for row in rows:
        assert row["advice"] == diffs[row["name"]].read_text().partition("\n")[0].split()
        assert row["advice"][0] == mistakes.id_of(FOUND[row["name"]])
        assert {*row["advice"]} <= mistakes.sections().keys()
    right = sum(row["corrected"] == "right" for row in rows)
    assert f"**{right} of {len(FOUND)}**" in " ".join((CORPUS / "README.md").read_text().split())


def test_a_tool_is_asked_again_after_its_own_advice(tmp_path):
    tool = tmp_path / "tool.py"
    tool.write_text("import sys\nsys.exit('loss / world_size' in open(sys.argv[1]).read())\n")
    (case,) = run.find_cases(["bugs/reduction/divided_by_processes"])
    command = f"{sys.executable} {tool} {{script}}"
    assert run.ask(command, case).code == 1
    assert run.ask_again(command, case) == {"name": case.name, "advice": ["factor"], "corrected": "right"}


def test_a_bug_and_a_right_program_are_shown(capsys):
    assert run.main(["bugs/reduction/divided_by_processes", "right/resumes_after_an_epoch"]) == 0
    assert "2 of 2 programs show what they should" in capsys.readouterr().out


@pytest.mark.parametrize(
    "edit", [('"--fixed" in sys.argv', "False"), ("not FIXED", "False"), ("optimizer.step()", "1 / 0")]
)
def test_a_program_that_does_not_show_its_bug_is_told(edit, tmp_path, monkeypatch, capsys):
    text = (CORPUS / "bugs" / "reduction" / "divided_by_processes.py").read_text()
    assert edit[0] in text
    path = tmp_path / "bugs" / "reduction" / "case.py"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(*edit))
    monkeypatch.setattr(run, "HERE", tmp_path)
    cases = run.find_cases(["bugs"])
    run.preload(cases)
    assert not run.check(*cases, [2])
    said = capsys.readouterr().out
    assert "ZeroDivisionError" in said if edit[1] == "1 / 0" else said.startswith("NOT SHOWN bugs/reduction/case")


@pytest.mark.parametrize(
    ("far", "message", "accuses", "words"),
    [
        (0, True, False, "2 of 2 bugs found, 2 with the wrong line and 0 with another"),
        (4, True, False, "2 of 2 bugs found, 0 with the wrong line and 2 with another"),
        (0, False, True, "2 of 2 bugs found, 0 with the wrong line and 0 with another"),
    ],
)
def test_what_a_tool_says_is_counted(far, message, accuses, words, tmp_path, capsys):
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL.replace("FAR", str(far)).replace("MESSAGE", str(message)).replace("ACCUSES", str(accuses)))
    cases = run.find_cases(["bugs/reduction/divided_by", "bugs/reduction/multiplied_by", "right/closure"])
    run.preload(cases)
    is_perfect = run.compare(f"{sys.executable} {tool} {{script}}", cases, jobs=2)
    said = capsys.readouterr().out
    assert is_perfect == (not accuses)
    assert words in said
    assert f"{3 * accuses} of 3 right programs accused" in said
    assert "| bugs/reduction/divided_by_processes | - | **wrong** |" in said


def test_brackets_are_for_programs_that_resume(monkeypatch):
    called = []
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(run.subprocess, "run", lambda words, **_: called.append(words) or done)
    for case in run.find_cases(["bugs/resume/optimizer_is_not_saved", "right/closure"]):
        run.ask("prove [--resume_flags=--resume] {script}", case, "--fixed")
    assert [words[1:-2] for words in called] == [["--resume_flags=--resume"], []]
    assert all(words[-1] == "--fixed" for words in called)


@pytest.mark.parametrize("words", [["bugs/none"], ["--tool", "prove"], ["--jobs", "0"], ["--processes", "1"]])
def test_wrong_flags_are_an_error(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(words)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.slow
def test_every_program_shows_what_it_should():
    # Three processes would show the same, and take twice as long again.
    command = [sys.executable, str(CORPUS / "run.py"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "NOT SHOWN" in line or "Error" in line]
