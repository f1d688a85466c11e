"""The seam to prove: scripts of this project are judged by what utils/observed.py tells, and by nothing else.

planted.py trains through GlobalLoader and Run; planted_mistakes.py has mistakes in it, and right changes of it.
"""

import ast
import json
import subprocess
import sys
from typing import NamedTuple

import pytest
from conftest import ROOT

from tests.seam import planted_mistakes as planted

PROVE = ROOT / "prove"
FOLDER = ROOT / "tests" / "seam"
pytestmark = pytest.mark.skipif(not PROVE.exists(), reason="prove/ is not here")
V6 = ("--virtual_processes", "6")


class Said(NamedTuple):
    code: int
    text: str

    @property
    def verdict(self) -> str:
        return self.text.splitlines()[-1]


def program(name: str, edits=(), flags=(), processes=(2,)) -> dict:
    """A program for judge.py: planted.py after some edits."""
    text = (FOLDER / "planted.py").read_text()
    for old, new in [*edits, ("parents[2]", "parents[0]")]:
        assert old in text, old
        text = text.replace(old, new)
    return {"name": name, "text": text, "flags": flags, "processes": processes}


def judge(programs: list[dict], folder) -> dict[str, Said]:
    words, folder = [sys.executable, FOLDER / "judge.py"], str(folder)
    done = subprocess.run(words, input=json.dumps(programs), cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: Said(*said) for name, said in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    few = [program("right", flags=V6, processes=(2, 3))]
    few += [program(name, **mistake.of_program()) for name, mistake in planted.FOR_THE_SEAM.items()]
    return judge(few, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def all_programs(tmp_path_factory):
    programs = [program("resumed", processes=(3,))]
    for name, edits in planted.CORRECT.items():
        programs += [program(f"{name} {kind}", edits, flags) for kind, flags in planted.KINDS.items()]
    programs += [program(name, **mistake.of_program()) for name, mistake in planted.MISTAKES.items()]
    return judge(programs, tmp_path_factory.mktemp("all"))


def advice(kind: str) -> str:
    """The first line of a section's quotation in MISTAKES.md."""
    section = (PROVE / "prove_training" / "MISTAKES.md").read_text().split(f"\n## {kind.replace('_', '-')}\n")[1]
    return section.split("\n> ")[1].partition("\n")[0]


def test_a_right_script_is_proven_with_the_same_bits(quick):
    said = quick["right"]
    assert said.code == 0, said.text
    assert "samples, gradients, learning rates, weights and evaluations on 1, 2 and 3 processes" in said.verdict


@pytest.mark.parametrize("name", planted.FOR_THE_SEAM)
def test_what_only_the_seam_shows_is_found_at_its_line(quick, name):
    mistake = planted.FOR_THE_SEAM[name]
    said = quick[name]
    assert said.code == 1, said.text
    assert f"[{mistake.kind.replace('_', '-')}]" in said.text, said.text
    assert mistake.words in said.verdict, said.text
    assert "planted.py:" in said.verdict, said.text


@pytest.mark.slow
def test_a_program_that_trains_through_run_is_proven_and_resumed(all_programs):
    said = all_programs["resumed"]
    assert said.code == 0, said.text
    assert "the same after step 3" in said.text
    assert "samples, gradients, learning rates, weights and evaluations" in said.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.CORRECT)
@pytest.mark.parametrize("kind", planted.KINDS)
def test_a_correct_program_that_trains_through_run_is_proven(all_programs, name, kind):
    said = all_programs[f"{name} {kind}"]
    assert said.code == 0, said.text
    assert "gradients" in said.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", planted.MISTAKES)
def test_a_mistake_in_a_program_that_trains_through_run_is_named(all_programs, name):
    said = all_programs[name]
    assert said.code == 1, said.text
    assert f"what to do: {advice(planted.MISTAKES[name].kind)}" in said.text


@pytest.mark.slow
@pytest.mark.parametrize("edit", [("VERSION = 1", "VERSION = 2"), None], ids=["a newer copy", "an older copy"])
def test_a_script_of_another_version_is_judged_as_any_other(tmp_path, edit):
    """With one sentence, and no error of what is not there."""
    for name in ("utils", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "utils").unlink()
    (tmp_path / "utils").mkdir()
    for path in (ROOT / "utils").iterdir():
        if path.name != "observed.py":
            (tmp_path / "utils" / path.name).symlink_to(path)
    if edit:
        text = (ROOT / "utils" / "observed.py").read_text()
        assert edit[0] in text
        (tmp_path / "utils" / "observed.py").write_text(text.replace(*edit))
    (tmp_path / "planted.py").write_text((FOLDER / "planted.py").read_text().replace("parents[2]", "parents[0]"))
    done = subprocess.run([sys.executable, PROVE, "planted.py"], cwd=tmp_path, capture_output=True, text=True)
    version = "2" if edit else "none"
    note = f"utils.observed has version {version} instead of 1: the script is judged as any other"
    assert note in done.stdout, done.stdout + done.stderr
    assert done.returncode in (0, 3), done.stdout


@pytest.mark.slow
def test_an_example_in_plain_accelerate_is_proven():
    words = [sys.executable, PROVE, ROOT / "examples" / "plain_accelerate.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("proven: ")


def test_prove_reads_no_name_of_utils_that_observed_does_not_document():
    """Nothing by getattr with a default: what is not there any more must be an error, and not a promise less."""
    page = (PROVE / "prove_training" / "recording" / "global_loader.py").read_text()
    names = {node.attr for node in ast.walk(ast.parse(page)) if isinstance(node, ast.Attribute)}
    observed = ast.parse((ROOT / "utils" / "observed.py").read_text())
    functions = {node.name for node in observed.body if isinstance(node, ast.FunctionDef)}
    assert functions <= names, "a function of observed.py that prove does not ask for"
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(page)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if call.startswith("getattr(")]


def test_no_module_of_utils_imports_observed():
    for path in (ROOT / "utils").rglob("*.py"):
        names = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert not any("observed" in ast.unparse(node).split() for node in names), path
