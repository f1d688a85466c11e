import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from PIL import Image

from utils import atomic_files as files
from utils import console, memory
from utils import run_folder as tracking


@pytest.fixture
def make(tmp_path):
    """Trackers on one process, in tmp_path/run."""
    made = []

    def make(resume=False, folder="run"):
        accelerator = SimpleNamespace(
            is_main_process=True,
            device=SimpleNamespace(type="cpu"),
            log=lambda *_, **__: None,
            end_training=lambda: None,
        )
        made.append(tracking.Tracker(accelerator, tmp_path / folder, resume))
        return made[-1]

    yield make
    for tracker in made:
        tracker.lock.release()


def started(tracker, step=0, metrics_bytes=0):
    launch = {"num_processes": 1}
    # 6 test samples, a batch of 2: a third of 3 steps.
    tracker.start(step, 10, 5, metrics_bytes, {"data": {}}, launch, test_steps=1.0)
    return tracker


def killed_after_a_checkpoint(make) -> int:
    """A run that was killed a line after its checkpoint; what that knows of metrics.jsonl."""
    tracker = started(make())
    tracker.log("train", 5, 1, {"loss": 0.5, "samples": 10})
    saved = tracker.metrics_bytes()
    tracker.log("train", 6, 1, {"loss": 0.4, "samples": 10})
    tracker.lock.release()
    return saved


def test_metrics_go_on_where_the_checkpoint_was(make, tmp_path):
    saved = killed_after_a_checkpoint(make)
    tracker = started(make(resume=True), 5, saved)
    tracker.log("train", 6, 1, {"loss": 0.4, "samples": 10})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 6]  # none twice, none missing
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert [launch["from_step"] for launch in launches] == [0, 5]


def test_a_checkpoint_before_the_first_line_knows_where_the_file_ends(make, tmp_path):
    saved = killed_after_a_checkpoint(make)
    assert started(make(resume=True), 5, saved).metrics_bytes() == saved


def test_metrics_shorter_than_the_checkpoint_knows_are_not_lengthened(make, tmp_path, capsys):
    """The lines after the last flush to the disk are gone after a power cut."""
    tracker = started(make())
    for step in (5, 6):
        tracker.log("train", step, 1, {"loss": 0.5, "samples": 10})
    saved = tracker.metrics_bytes()
    tracker.lock.release()
    path = tmp_path / "run" / "metrics.jsonl"
    os.truncate(path, saved - 3)  # in the middle of a line
    capsys.readouterr()
    tracker = started(make(resume=True), 7, saved)
    said = capsys.readouterr().out
    assert said.startswith(f"warning: {path} is shorter than when the checkpoint was saved: ")
    tracker.log("train", 8, 2, {"loss": 0.4, "samples": 10})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 8]
    assert tracker.metrics_bytes() == path.stat().st_size
    tracker.lock.release()
    started(make(resume=True), 8, 10**13)
    assert path.stat().st_size < 1000


@pytest.mark.parametrize("content", [None, "", "{}", '{"launches": 5}', "[" * 5000, "\0" * 20])
def test_a_run_goes_on_without_run_json(make, tmp_path, capsys, content):
    started(make()).lock.release()
    path = tmp_path / "run" / "run.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
        (tmp_path / "run" / "summary.json").write_text(content)
    tracker = make(resume=True)
    assert tracker.completed_step() is None
    started(tracker, 5)
    said = capsys.readouterr().out
    assert said == f"warning: {path} is missing or damaged, and is written anew\n"
    assert [launch["from_step"] for launch in json.loads(path.read_text())["launches"]] == [5]


def test_the_folder_of_a_run_and_its_files_are_flushed_by_name(make, tmp_path, monkeypatch):
    """An fsync of a file does not cover its name in the folder."""
    flushed = []
    fsync = os.fsync

    def recorded(descriptor):
        path = tracking.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            flushed.append((path, sorted(each.name for each in path.iterdir())))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    started(make())
    assert flushed == [(tmp_path, ["run"]), (tmp_path / "run", [".lock", "metrics.jsonl", "run.json"])]


def test_finish_leaves_summary_and_picture(make, tmp_path, capsys):
    tracker = started(make())
    for step in (1, 2):
        tracker.log("train", step, 1, {"loss": 1 / step, "accuracy": 0.5, "samples": 10})
        tracker.log("test", step, 1, {"loss": 2 / step, "accuracy": 0.6})
    list(tracker.timed(range(3), 1))
    result = {"loss": 1.0, "accuracy": 0.6, "confusion": [[1, 2], [3, 4]]}
    tracker.finish(2, result, "a title", best_accuracy=0.7)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] == 0.6
    assert summary["best_accuracy"] == 0.7
    peak = memory.own_peak_memory_gib(torch.device("cpu"))  # by now; drawing took some
    assert peak - 0.2 < summary["peak_memory_gib"] <= peak + 0.001
    with Image.open(tmp_path / "run" / "curves.png") as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 100  # curves, not a blank sheet
    assert "done: test loss 1.0000, test accuracy 60.00%" in capsys.readouterr().out


def test_a_folder_with_a_run_is_refused_without_resume(make, capsys):
    started(make()).lock.release()
    with pytest.raises(SystemExit):
        make()
    assert "already holds a run: add --resume" in capsys.readouterr().err
    make(resume=True)


def test_checkpoints_without_run_json_are_a_run_too(make, tmp_path, capsys):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    make().lock.release()
    (tmp_path / "run" / "checkpoints" / "step_00000005").mkdir()
    with pytest.raises(SystemExit):
        make()
    assert "already holds a run: add --resume" in capsys.readouterr().err
    make(resume=True)


def test_a_second_run_in_the_folder_is_refused(make, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(SystemExit):
        make()
    assert "another run is writing to" in capsys.readouterr().err


def test_the_lock_goes_with_its_process(make, tmp_path):
    (tmp_path / "run").mkdir()
    code = "import sys, filelock, os\nfilelock.FileLock(sys.argv[1]).acquire()\nos.kill(os.getpid(), 9)\n"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run" / ".lock")], check=False)
    make()


def test_a_folder_that_cannot_be_made_is_refused(make, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        make(folder="file/run")
    assert "cannot be written to: Not a directory" in capsys.readouterr().err


def test_a_read_only_folder_is_refused(tmp_path):
    """In a process of its own without root's rights: root may write anywhere."""
    (tmp_path / "run").mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from types import SimpleNamespace\n"
        "from utils.run_folder import Tracker\n"
        "if os.getuid() == 0:\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "Tracker(SimpleNamespace(is_main_process=True), sys.argv[1], False)\n"
    )
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & 0o001 and os.getuid() == 0 and parent.owner() == "root":
            parent.chmod(parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(tracking.Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be written to: Permission denied" in done.stderr


def test_a_run_that_never_began_leaves_no_folder(make, tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(tracking.atexit, "register", lambda *call: at_exit.append(call))
    make()
    (function, folder) = at_exit.pop()
    function(folder)
    assert not (tmp_path / "run").exists()
    function(folder)  # gone already
    (tmp_path / "run").mkdir()
    make()
    assert not at_exit  # it was there before this run
    started(make(folder="other"))
    (function, folder) = at_exit.pop()
    function(folder)
    assert (tmp_path / "other" / "run.json").exists()


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_a_full_disk_is_one_sentence(make, tmp_path, capsys, name):
    tracker = make()
    (tmp_path / "run" / f".part_{name}").symlink_to("/dev/full")

    def run():
        started(tracker).log("test", 10, 1, {"loss": 1.0, "accuracy": 0.5})
        tracker.finish(10, {"loss": 1.0, "accuracy": 0.5}, "a title")

    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/run/{name} cannot be written: No space left on device\n"
    assert not (tmp_path / "run" / name).exists()
    assert not (tmp_path / "run" / f".part_{name}").is_symlink()


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """In the place of the module time: what the run does takes the seconds that the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(tracking, "time", self)
        self.perf_counter = self.time = lambda: self.now
        self.strftime = lambda _: "now"


@pytest.mark.parametrize("resumed_at", [0, 5])
def test_the_time_left_counts_steps_and_evaluations(make, monkeypatch, capsys, tmp_path, resumed_at):
    """10 steps of 2 batches and 1 s, the first one 10 s; a test after 5 and 10, of 3 s.

    The time of the first test is a guess: that of one step.
    """
    clock = Clock(monkeypatch)
    if resumed_at:
        started(make()).lock.release()
    tracker = started(make(resume=True), resumed_at)
    assert tracker.speed(resumed_at) == (0, 0)  # not known yet
    evaluated = {0: 0, 5: 1}[resumed_at]  # a run resumed at the end of an epoch begins with its evaluation
    if evaluated:
        clock.now += 3
        tracker.log("test", 5, 1, {"loss": 1.0})
    step = resumed_at
    for batch in tracker.timed(range(10), 2):
        clock.now += 5 if step == resumed_at else 0.5
        if batch % 2:
            step += 1
            if step % 5 == 0:  # the body of this step is not over
                tracker.log("train", step, 1, {"loss": 1.0, "samples": 2})
    left = {0: "0:00:07", 5: "0:00:03"}[resumed_at]  # of the first test only its size is known: that of one step
    assert f"eta {left}\n" in capsys.readouterr().out
    clock.now += 3
    tracker.log("test", step, 1, {"loss": 1.0})
    assert tracker.speed(step) == (1.0, {0: 5 * 1 + 3, 5: 0}[resumed_at])
    assert "eta" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert started(tracker, 7).tests_left == 1  # the first one was before


def test_the_bar_is_gone_where_a_line_is_printed_and_at_the_end(make, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    clock = Clock(monkeypatch)
    tracker = started(make())
    for batch in tracker.timed(range(20), 2):
        clock.now += 0.25
        if batch % 10 == 9:
            tracker.log("train", (batch + 1) // 2, 1 + batch // 10, {"loss": 1.0, "accuracy": 0.5, "samples": 2})
            tracker.log("test", (batch + 1) // 2, 1 + batch // 10, {"loss": 1.0, "accuracy": 0.5})
    tracker.finish(10, {"loss": 1.0, "accuracy": 0.5}, "a title")
    drawn = terminal.getvalue()
    assert "| 3/10 steps, 2.0 steps/s, 0:00:04 left" in drawn
    assert "| 5/10 steps, testing, " in drawn
    screen = []  # what can be read after each line
    for line in drawn.split("\n"):
        row = ""
        for piece in line.split("\r"):
            row = piece.removeprefix("\033[K") if piece.startswith("\033[K") else piece + row[len(piece) :]
        screen.append(row.strip())
    assert [line[:13] for line in screen[:4:2]] == ["train epoch 1", "train epoch 2"]
    assert [line[:13] for line in screen[1:4:2]] == ["test  epoch 1", "test  epoch 2"]
    assert "left" not in "".join(screen)
    assert screen[4].startswith("\033[1;32mdone:\033[0m test loss")
    assert screen[5:] == [""]
    assert "left" not in drawn.partition("done:")[0].rpartition("\n")[2]  # gone before the model is saved


def test_colours_on_a_terminal_only(monkeypatch):
    def said(file):
        console.show("error: so", "red", file)
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert said(io.StringIO()) == "error: so\n"
    assert said(Terminal()) == "\033[1;31merror:\033[0m so\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(Terminal()) == "error: so\n"


def test_json_is_written_whole_and_reads_well(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"confusion": [[1, 2], [3, 4]], "name": "[1,\n2]"})
    assert json.loads(path.read_text()) == {"confusion": [[1, 2], [3, 4]], "name": "[1,\n2]"}
    assert "[ 1, 2 ]" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_waiting_for_data_is_measured(make):
    import time

    def slow():
        for i in range(3):
            time.sleep(0.02)
            yield i

    tracker = make()
    for _ in tracker.timed(slow(), 1):
        time.sleep(0.01)
    assert 0.06 <= tracker.wait_time_s < tracker.train_time_s
    assert tracker.train_time_s >= 0.09
    for _ in tracker.timed(slow(), 1):
        time.sleep(0.05)
        break
    assert tracker.train_time_s >= 0.16  # the step that was left by break counts too
