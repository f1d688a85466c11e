"""A cache that several processes build: once, and never from half of a build."""

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from readers.cache import build_cached, read_manifest, sample_digest, write_manifest

FORK = multiprocessing.get_context("fork")


def build_and_count(folder, started, may_build):
    def build():
        with open(folder / "calls", "a") as calls:
            calls.write("built\n")
        (folder / "content").write_text("whole")

    started.release()
    may_build.wait()
    assert build_cached((folder / "content").read_text, build, folder, "the content") == "whole"


def test_processes_that_come_at_once_build_once(tmp_path):
    started, may_build = FORK.Semaphore(0), FORK.Event()
    processes = [FORK.Process(target=build_and_count, args=(tmp_path, started, may_build)) for _ in range(3)]
    with open(tmp_path / ".lock", "w") as lock:  # all of them find nothing, and then wait for the lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        for process in processes:
            process.start()
        for _ in processes:
            started.acquire(timeout=30)
        may_build.set()
        time.sleep(0.5)
        fcntl.flock(lock, fcntl.LOCK_UN)  # the processes have this file open, too
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "built\n"


def test_a_worker_that_outlives_the_build_does_not_keep_the_lock(tmp_path):
    workers = []

    def build():
        workers.append(FORK.Process(target=time.sleep, args=(60,)))
        workers[0].start()
        (tmp_path / "content").write_text("whole")

    build_cached((tmp_path / "content").read_text, build, tmp_path, "the content")
    (tmp_path / "content").unlink()
    began = time.monotonic()
    build_cached((tmp_path / "content").read_text, lambda: (tmp_path / "content").write_text("x"), tmp_path, "it")
    assert time.monotonic() - began < 10
    workers[0].kill()
    workers[0].join()


HOLD = """
import sys, time
from pathlib import Path
from readers.cache import build_cached
folder = Path(sys.argv[1])
build_cached((folder / "content").read_text, lambda: print("building", flush=True) or time.sleep(60), folder, "it")
"""


def test_the_lock_ends_with_a_process_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    build_cached((tmp_path / "content").read_text, lambda: (tmp_path / "content").write_text("x"), tmp_path, "it")
    assert (tmp_path / "content").read_text() == "x"


@pytest.mark.parametrize("size", [0, 1, 4096, 10_000, 1_000_000])
def test_a_digest_is_of_the_size_and_of_parts_all_over_a_file(tmp_path, size):
    file = tmp_path / "file"
    content = os.urandom(size)
    file.write_bytes(content)
    whole = sample_digest(file)
    file.write_bytes(content + b"more")
    assert sample_digest(file, size) == whole
    assert sample_digest(file) != whole
    for place in {0, size // 2, size - 1} if size else ():
        for length in (1, 20_000):
            changed = bytearray(content)
            changed[place : place + length] = b"\xff" * len(changed[place : place + length])
            file.write_bytes(changed)
            assert (sample_digest(file) != whole) or bytes(changed) == content or (length == 1 and size > 2**18)


def test_a_manifest_is_read_only_with_the_files_that_it_names(tmp_path):
    (tmp_path / "a").write_text("content")
    write_manifest(tmp_path / "manifest.json", {"number": 1}, ["a"])
    assert read_manifest(tmp_path / "manifest.json") == {"number": 1, "digests": {"a": sample_digest(tmp_path / "a")}}
    (tmp_path / "a").write_text("Content")
    with pytest.raises(ValueError, match="a was changed"):
        read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize("change", [{"digests": {}}, {"digests": []}, {"number": "1"}, {"number": None}, {"more": 1}])
def test_a_manifest_whose_content_was_changed_is_refused(tmp_path, change):
    (tmp_path / "a").write_text("content")
    file = tmp_path / "manifest.json"
    write_manifest(file, {"number": 1}, ["a"])
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"manifest\.json was changed"):
        read_manifest(file)
