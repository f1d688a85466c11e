import errno
import os

import pytest

from utils import atomic_files as files


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def save(part):
        part.write_text("half")
        assert path.read_text() == "old"
        part.write_text("new")

    files.write_atomically(path, save)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_the_disk_before_the_file_gets_its_name(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    events = []
    fsync = os.fsync

    def recorded(descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append((os.path.basename(target), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    files.write_atomically(path, lambda part: part.write_text("x"))
    assert events == [(".part_a.txt", False), (tmp_path.name, True)]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    part = tmp_path / ".part_a.json"
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        files.write_json(path, {"x": 1})
    assert path.read_text() == "old"
    assert not os.path.lexists(part)


def test_an_error_of_save_is_raised_and_leaves_no_file(tmp_path):
    def save(part):
        part.write_text("half")
        raise ValueError("this cannot be saved")

    with pytest.raises(ValueError, match="this cannot be saved"):
        files.write_atomically(tmp_path / "a", save)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_flush_folders_is_accepted(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    refuse(errno.EINVAL)
    files.fsync(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as raised:
        files.fsync(tmp_path)
    assert raised.value.filename == str(tmp_path)
