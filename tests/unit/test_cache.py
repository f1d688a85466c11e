"""A folder that several processes need: built once, and never used half built or damaged."""

import errno
import fcntl
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from utils.data.cache import build_once

FORK = multiprocessing.get_context("fork")


def build(folder, text="whole"):
    def write():
        (folder / "content").write_text(text)
        with open(folder.parent / "calls", "a") as calls:
            calls.write("built\n")
        return {"text": text}

    return build_once(folder, write)


def build_at_once(folder, started, may_build):
    started.release()
    may_build.wait()
    assert build(folder) == {"text": "whole"}


def test_processes_that_come_at_once_build_once(tmp_path):
    started, may_build = FORK.Semaphore(0), FORK.Event()
    folder = tmp_path / "folder"
    processes = [FORK.Process(target=build_at_once, args=(folder, started, may_build)) for _ in range(3)]
    with open(tmp_path / "folder.lock", "w") as lock:  # all of them find nothing, and then wait for the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        for process in processes:
            process.start()
        for _ in processes:
            started.acquire(timeout=30)
        may_build.set()
        time.sleep(0.5)
        assert not (tmp_path / "calls").exists()
        fcntl.flock(lock, fcntl.LOCK_UN)  # the processes have this file open, too
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "built\n"


def test_after_a_kill_it_is_built_anew(tmp_path, capsys):
    folder = tmp_path / "folder"

    def write_half():
        (folder / "content").write_text("half")
        (folder / "more").mkdir()
        raise KeyboardInterrupt  # no handler of it may be needed: a kill has none

    with pytest.raises(KeyboardInterrupt):
        build_once(folder, write_half)
    assert (folder / "more").exists()
    assert build(folder) == {"text": "whole"}
    assert (folder / "content").read_text() == "whole"
    assert sorted(os.listdir(folder)) == ["content", "manifest.json"]
    assert "is damaged or incomplete, and is built anew" in capsys.readouterr().out
    assert build(folder, "other") == {"text": "whole"}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("content", lambda path: os.truncate(path, 0)),
        ("content", lambda path: path.write_bytes(path.read_bytes().replace(b"who", b"abc"))),
        ("content", Path.unlink),
        ("manifest.json", lambda path: os.truncate(path, path.stat().st_size - 2)),
    ],
)
def test_what_is_damaged_is_built_anew(tmp_path, name, damage):
    folder = tmp_path / "folder"
    build(folder)
    assert build(folder, "a whole new") == {"text": "whole"}
    damage(folder / name)
    assert build(folder, "a whole new") == {"text": "a whole new"}
    assert (folder / "content").read_text() == "a whole new"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSPC])
def test_a_cache_that_cannot_be_locked_or_written_is_one_sentence(tmp_path, capsys, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock" if code == errno.ENOLCK else "os.fsync", fail)
    with pytest.raises(SystemExit):
        build(tmp_path / "folder")
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/folder")
    assert os.strerror(code) in said
    assert "--cache_dir" in said
    assert not (tmp_path / "folder" / "manifest.json").exists()
    monkeypatch.undo()
    assert build(tmp_path / "folder") == {"text": "whole"}
