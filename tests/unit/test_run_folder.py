import errno
import io
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import run_reader
from conftest import ROOT
from fakes import fake_accelerator
from filelock import FileLock

from utils import console, run_folder


@pytest.fixture
def make(tmp_path):
    """Run folders of one process, in tmp_path/run."""
    made = []

    def make(resume=False, folder="run"):
        made.append(run_folder.RunFolder(fake_accelerator(), tmp_path / folder, resume))
        return made[-1]

    yield make
    for folder in made:
        folder.lock.close()


def started(folder, step=0, metrics_bytes=0):
    folder.open(step, metrics_bytes, {"data": {}}, {"num_processes": 1})
    return folder


def log(folder, step, loss=0.5):
    folder.write_metrics({"split": "train", "step": step, "loss": loss})


def killed_after_a_checkpoint(make) -> int:
    """A run that was killed a line after its checkpoint; what that knows of metrics.jsonl."""
    folder = started(make())
    log(folder, 5, 0.5)
    saved = folder.metrics_bytes()
    log(folder, 6, 0.4)
    folder.lock.close()
    return saved


def test_metrics_go_on_where_the_checkpoint_was(make, tmp_path):
    saved = killed_after_a_checkpoint(make)
    folder = started(make(resume=True), 5, saved)
    log(folder, 6, 0.4)
    lines = run_reader.lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [5, 6]  # none twice, none missing
    launches = run_reader.launches(tmp_path / "run")
    assert [launch["from_step"] for launch in launches] == [0, 5]


def test_a_checkpoint_before_the_first_line_knows_where_the_file_ends(make, tmp_path):
    saved = killed_after_a_checkpoint(make)
    assert started(make(resume=True), 5, saved).metrics_bytes() == saved


def test_a_file_that_lost_lines_is_not_filled_up(make, tmp_path):
    saved = killed_after_a_checkpoint(make)
    assert started(make(resume=True), 5, saved + 10**6).metrics_bytes() < 10**6


@pytest.mark.parametrize("content", [None, "", "{}", '{"launches": 5}', "\0" * 20])
def test_a_run_goes_on_without_run_json(make, tmp_path, content):
    started(make()).lock.close()
    path = tmp_path / "run" / "run.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
        (tmp_path / "run" / "summary.json").write_text(content)
    folder = make(resume=True)
    assert folder.read_summary(5) is None
    started(folder, 5)
    assert [launch["from_step"] for launch in json.loads(path.read_text())["launches"]] == [5]


def test_a_folder_with_a_run_is_refused_without_resume(make, capsys):
    started(make()).lock.close()
    with pytest.raises(SystemExit):
        make()
    assert "already holds a run: add --resume" in capsys.readouterr().err
    make(resume=True)


def test_checkpoints_without_run_json_are_a_run_too(make, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    make().lock.close()
    (tmp_path / "run" / "checkpoints" / "step_00000005").mkdir()
    with pytest.raises(SystemExit):
        make()
    assert "already holds a run: add --resume" in capsys.readouterr().err
    assert make(resume=True).has_checkpoint
    assert not make(resume=True, folder="new").has_checkpoint


def test_a_second_run_in_the_folder_is_refused(make, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(SystemExit):
        make()
    assert "another run is writing to" in capsys.readouterr().err


def test_each_machine_says_why_the_folder_cannot_be_used(make, monkeypatch, capsys):
    sent = []
    monkeypatch.setattr("utils.agree.broadcast_object_list", lambda values: sent.append(values) or values)
    started(make()).lock.close()
    with pytest.raises(SystemExit):
        make()
    said = capsys.readouterr().err
    monkeypatch.setattr("utils.agree.broadcast_object_list", lambda _: sent[-1])
    with pytest.raises(SystemExit) as stopped:
        run_folder.RunFolder(SimpleNamespace(is_main_process=False), "run", None)
    assert capsys.readouterr().err == said
    assert said.startswith("error: ")
    assert stopped.value.code == 2


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_folder_without_locks_is_used_with_a_warning_also_after_a_kill(make, tmp_path, capsys, monkeypatch, code):
    def no_flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", no_flock)
    started(make())
    assert capsys.readouterr().out.startswith("warning: ")
    folder = started(make(resume=True), 5)  # nothing was released
    assert [launch["from_step"] for launch in run_reader.launches(tmp_path / "run")] == [0, 5]
    assert folder.path == tmp_path / "run"


def test_a_folder_that_cannot_be_made_is_refused(make, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        make(folder="file/run")
    assert "cannot be written to: Not a directory" in capsys.readouterr().err


def test_a_read_only_folder_is_refused():
    """In a process of its own without root's rights: root may write anywhere."""
    code = (
        "import os, sys\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from fakes import fake_accelerator\n"
        "from utils.run_folder import RunFolder\n"
        "if os.getuid() == 0:\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "RunFolder(fake_accelerator(), sys.argv[1], False)\n"
    )
    # Not tmp_path: only its owner may look into the folders above it.
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        os.chmod(parent, 0o755)
        os.mkdir(f"{parent}/run", mode=0o555)
        words = [sys.executable, "-c", code, f"{parent}/run", str(ROOT), str(ROOT / "tests" / "harness")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot be written to: Permission denied" in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_on_a_terminal_only(monkeypatch):
    def said(file):
        console.show("error: so", file)
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert said(io.StringIO()) == "error: so\n"
    assert said(Terminal()) == "\033[1;31merror:\033[0m so\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(Terminal()) == "error: so\n"
