"""Whatever a script does under prove, the user's files stay as they are, and no process stays."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from prove_training import command, sandbox

PROGRAM = ROOT / "tests" / "writes_files.py"
FILES = ("best.pt", "predictions.npy", "log.bin", "mapped.bin", "renamed.bin", "train.log", "truncated.bin")
FILES += ("child.bin", "shared.bin", "checkpoints/step_1/model.bin")


def contents(folder: Path) -> dict:
    return {
        path: (path.lstat().st_size, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


@pytest.fixture
def users_folder(tmp_path):
    """With files of 3 MB, and a link to a file elsewhere; must be the same at the end."""
    folder, elsewhere = tmp_path / "user", tmp_path / "elsewhere"
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    elsewhere.mkdir()
    for name in FILES:
        (folder / name).write_bytes(os.urandom(3_000_000))
    (elsewhere / "linked.bin").write_bytes(os.urandom(3_000_000))
    (folder / "link.bin").symlink_to("../elsewhere/linked.bin")
    shutil.copy(PROGRAM, folder / "train.py")
    before = contents(tmp_path)
    yield folder
    assert contents(tmp_path).keys() == before.keys()
    assert {path for path, content in contents(tmp_path).items() if content != before[path]} == set()


NO_MOUNTS = {"can_mount": lambda *_: False}
WAYS = {
    "mounts": {},
    "a copy and Landlock": NO_MOUNTS,
    "a copy alone": NO_MOUNTS | {"can_forbid_writes": lambda: False},
}


def start(folder: Path, output: Path, *words: str) -> int:
    """Start the command in a process that is forked from this one. Returns the process id."""

    def prove_here() -> int:
        os.setsid()
        os.chdir(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout = sys.stderr = open(output, "w")  # noqa: SIM115  until the end
        sys.argv[1:] = words
        return command.main()

    return sandbox.forked(prove_here)


@pytest.fixture
def prove(monkeypatch, tmp_path_factory):
    """Run the command in a folder, and return its exit code and what it says."""

    def prove(folder: Path, way: str) -> tuple[int, str]:
        words = ["--processes", "2", "--keep", "proof", "train.py"]
        if way == "mounts":  # as a user does
            words = [sys.executable, str(ROOT / "prove_training"), *words]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
            return done.returncode, done.stdout + done.stderr
        for name, function in WAYS[way].items():
            monkeypatch.setattr(sandbox, name, function)
        output = tmp_path_factory.mktemp("output") / "output.txt"
        _, status = os.waitpid(start(folder, output, *words), 0)
        return os.waitstatus_to_exitcode(status), output.read_text()

    return prove


@pytest.mark.parametrize("way", [pytest.param("mounts", marks=pytest.mark.slow), "a copy and Landlock", "a copy alone"])
def test_ten_ways_to_write_a_file_change_nothing_and_the_script_is_proven(prove, users_folder, way):
    before = users_folder.stat()
    code, said = prove(users_folder, way)
    written = [int(path.read_text()) for path in (users_folder / "proof").rglob("written")]
    shutil.rmtree(users_folder / "proof")
    os.utime(users_folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert code == 0, said
    assert said.splitlines()[-1].startswith("proven"), said
    assert len(written) == 2, "each run has come to its end"
    for pid in written:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_copy_has_small_files_and_links_to_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "COPIED_BYTES", 10)
    monkeypatch.setattr(sandbox, "COPIED_FILES", 12)
    user, copy = tmp_path / "user", tmp_path / "user" / "kept" / "copy"
    for folder in ("images", "code", "code/inner", ".git", "kept"):
        (user / folder).mkdir(parents=True)
    for number in range(20):
        (user / "images" / f"{number}.png").write_text("")
    (user / "code" / "train.py").write_text("small")
    (user / "code" / "inner" / "weights.pt").write_text("more than ten bytes")
    (tmp_path / "elsewhere.txt").write_text("1")
    (tmp_path / "elsewhere").mkdir()
    targets = {"inside": "code/train.py", "outside": "../elsewhere.txt", "folder": "../elsewhere", "broken": "/nowhere"}
    for name, target in targets.items():
        (user / name).symlink_to(target)
    sandbox.copy_folder(user, copy, may_link=True)
    links = {str(path.relative_to(copy)): os.readlink(path) for path in copy.rglob("*") if path.is_symlink()}
    assert links == {
        "images": str(user / "images"),
        "code/inner/weights.pt": str(user / "code" / "inner" / "weights.pt"),
        "inside": "code/train.py",
        "folder": str(tmp_path / "elsewhere"),
    }
    copied = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if not path.is_symlink()}
    assert copied == {"code", "code/train.py", "code/inner", "outside"}
    assert (copy / "outside").read_text() == "1"


def test_what_cannot_be_copied_is_not_used_at_all(prove, tmp_path):
    (tmp_path / "train.py").write_text("")
    with open(tmp_path / "data.bin", "w") as file:
        os.truncate(file.fileno(), 10**10)
    code, said = prove(tmp_path, "a copy alone")
    assert code == 3
    assert "data.bin is too large to be copied" in said


@pytest.mark.parametrize(("load", "factor"), [(0.2, 1), (2.0, 1), (7.0, 3.5)])
def test_a_machine_is_slow_where_more_processes_want_to_run_than_there_are_processors(monkeypatch, load, factor):
    monkeypatch.setattr(sandbox.os, "getloadavg", lambda: (load, 99, 99))
    monkeypatch.setattr(sandbox.os, "cpu_count", lambda: 2)
    assert sandbox.slowness() == factor


def descendants(pid: int) -> list[int]:
    children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(tmp_path, number):
    (tmp_path / "train.py").write_text("import subprocess\nsubprocess.run(['sleep', '60'])\n")

    proving, end = start(tmp_path, tmp_path / "output.txt", "train.py"), time.monotonic() + 60
    while len(started := descendants(proving)) < 3:  # one that supervises, the rank, and sleep
        assert time.monotonic() < end
        time.sleep(0.1)
    os.killpg(proving, number)
    os.waitpid(proving, 0)
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < end
        time.sleep(0.1)
