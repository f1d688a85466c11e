import errno
import json
import os
from types import SimpleNamespace

import pytest
import run_reader
from fakes import fake_accelerator
from filelock import FileLock

from utils import run_folder


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


@pytest.mark.parametrize("lost", [0, 10**6])  # bytes of lines, which are not filled up
def test_metrics_go_on_where_the_checkpoint_was(make, tmp_path, lost):
    """Of a run that was killed a line after it."""
    folder = started(make())
    folder.write_metrics({"step": 5})
    saved = folder.metrics_bytes()
    folder.write_metrics({"step": 6})
    folder.lock.close()
    folder = started(make(resume=True), 5, saved + lost)
    if not lost:
        assert folder.metrics_bytes() == saved
        folder.write_metrics({"step": 6})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]  # none twice, none missing
    assert [launch["from_step"] for launch in run_reader.launches(tmp_path / "run")] == [0, 5]


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


def test_a_folder_with_a_run_is_refused_without_resume(make):
    started(make()).lock.close()
    with pytest.raises(SystemExit, match="already holds a run: add --resume"):
        make()
    make(resume=True)


def test_checkpoints_without_run_json_are_a_run_too(make, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    make().lock.close()
    (tmp_path / "run" / "checkpoints" / "step_00000005").mkdir()
    with pytest.raises(SystemExit, match="already holds a run: add --resume"):
        make()
    assert make(resume=True).has_checkpoint
    assert not make(resume=True, folder="new").has_checkpoint


def test_a_second_run_in_the_folder_is_refused(make, tmp_path, stops):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        assert "another run is writing to" in stops(make)


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


def test_a_folder_that_cannot_be_made_is_refused(make, tmp_path, stops):
    (tmp_path / "file").write_text("")
    assert "cannot be written to: Not a directory" in stops(lambda: make(folder="file/run"))
