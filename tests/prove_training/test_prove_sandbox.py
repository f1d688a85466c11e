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

from prove_training import sandbox

PROGRAM = ROOT / "tests" / "prove_training" / "writes_files.py"
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


WAYS = {
    "mounts": "pass",
    "a copy and Landlock": "sandbox.can_mount = lambda *_: False",
    "a copy alone": "sandbox.can_mount = lambda *_: False; sandbox.can_forbid_writes = lambda: False",
}
COMMAND = (
    "import sys; sys.path.insert(0, {root!r}); from prove_training import sandbox; {way}; "
    "from prove_training.command import main; sys.exit(main())"
)


def prove(folder: Path, *words, way: str = "pass", **options):
    command = COMMAND.format(root=str(ROOT), way=way)
    words = [sys.executable, "-c", command, "--processes", "2", *words]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("way", ["mounts", *(pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:])])
def test_ten_ways_to_write_a_file_change_nothing_and_the_script_is_proven(users_folder, way):
    before = users_folder.stat()
    done = prove(users_folder, "--keep", "proof", "train.py", way=WAYS[way])
    written = [int(path.read_text()) for path in (users_folder / "proof").rglob("written")]
    shutil.rmtree(users_folder / "proof")
    os.utime(users_folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("proven"), done.stdout + done.stderr
    assert not done.stderr, done.stderr
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


@pytest.mark.slow
def test_what_cannot_be_copied_is_not_used_at_all(tmp_path):
    (tmp_path / "train.py").write_text("")
    with open(tmp_path / "data.bin", "w") as file:
        os.truncate(file.fileno(), 10**10)
    done = prove(tmp_path, "train.py", way=WAYS["a copy alone"])
    assert done.returncode == 3
    assert "data.bin is too large to be copied" in done.stdout


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
    words = [sys.executable, str(ROOT / "prove_training"), "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as proving:
        end = time.monotonic() + 60
        while len(started := descendants(proving.pid)) < 3:  # one that supervises, the rank, and sleep
            assert time.monotonic() < end
            time.sleep(0.1)
        os.killpg(proving.pid, number)
        said, _ = proving.communicate(timeout=20)
    assert "Traceback" not in said, said
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < end
        time.sleep(0.1)
