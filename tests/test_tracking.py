import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from filelock import FileLock
from PIL import Image

from utils import tracking


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
        args = argparse.Namespace(output_dir=str(tmp_path / folder), resume=resume, log_with=None)
        made.append(tracking.Tracker(accelerator, args))
        return made[-1]

    yield make
    for tracker in made:
        tracker.lock.release()


def started(tracker, step=0, metrics_bytes=0):
    tracker.start(step, 10, metrics_bytes, {"num_processes": 1}, {"train": 5})
    return tracker


def test_metrics_go_on_where_the_checkpoint_was(make, tmp_path):
    tracker = started(make())
    tracker.log("train", 5, 1, {"loss": 0.5, "samples": 10})
    saved = tracker.metrics_bytes()
    tracker.log("train", 6, 1, {"loss": 0.4, "samples": 10})
    tracker.lock.release()  # killed here
    tracker = started(make(resume=True), 5, saved)
    tracker.log("train", 6, 1, {"loss": 0.4, "samples": 10})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 6]  # none twice, none missing
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert [launch["from_step"] for launch in launches] == [0, 5]


def test_finish_leaves_summary_and_picture(make, tmp_path, capsys):
    tracker = started(make())
    for step in (1, 2):
        tracker.log("train", step, 1, {"loss": 1 / step, "accuracy": 0.5, "samples": 10})
        tracker.log("test", step, 1, {"loss": 2 / step, "accuracy": 0.6})
    list(tracker.timed(range(3)))
    tracker.finish(2, {"loss": 1.0, "accuracy": 0.6, "confusion": [[1, 2], [3, 4]]}, best_accuracy=0.7)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] == 0.6
    assert summary["best_accuracy"] == 0.7
    assert 0.01 < summary["peak_memory_gib"] < 100
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


def test_a_second_run_in_the_folder_is_refused(make, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(SystemExit):
        make()
    assert "another run is writing to" in capsys.readouterr().err


def test_the_lock_goes_with_its_process(make, tmp_path):
    (tmp_path / "run").mkdir()
    code = "import sys, filelock, os; filelock.FileLock(sys.argv[1]).acquire(); os.kill(os.getpid(), 9)"
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
        "import argparse, os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from types import SimpleNamespace\n"
        "from utils.tracking import Tracker\n"
        "if os.getuid() == 0:\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "Tracker(SimpleNamespace(is_main_process=True), argparse.Namespace(output_dir=sys.argv[1], resume=False))\n"
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


def test_json_is_written_whole_and_reads_well(tmp_path):
    path = tmp_path / "x.json"
    tracking.write_json(path, {"confusion": [[1, 2], [3, 4]], "name": "[1,\n2]"})
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
    for _ in tracker.timed(slow()):
        time.sleep(0.01)
    assert 0.06 <= tracker.wait_time_s < tracker.train_time_s
    assert tracker.train_time_s >= 0.09
    for _ in tracker.timed(slow()):
        time.sleep(0.05)
        break
    assert tracker.train_time_s >= 0.16  # the update that was left by break counts too
