"""A run that was stopped, anywhere and anyhow, ends like the run that was not. The kills are in test_kills.py."""

import errno
import json
import os
import shutil
import signal
import time

import pytest
import run_folders
import run_reader
import torch
from conftest import ROOT

from utils.checkpoint import Checkpoints
from utils.checkpoint import folder as disk
from utils.failures.signals import EXIT_REQUEUE

TIMELESS = ("split", "step", "epoch", "loss", "accuracy", "lr")


def contents(run):
    """What must be equal bit by bit: model, optimizer, and the metrics but for their times."""
    return (
        (run / "model.safetensors").read_bytes(),
        (run_reader.last_checkpoint(run) / "optimizer.safetensors").read_bytes(),
        [[entry for entry in line.items() if entry[0] in TIMELESS] for line in run_reader.lines(run)],
    )


@pytest.fixture
def whole(train, tmp_path, made={}):  # noqa: B006  made once, whatever test comes first
    """The run that was never stopped: 2 epochs of 4 steps, each with a test of 5 batches."""
    if not made:
        for steps in (1, 2):
            assert train(f"whole{steps}", "--gradient_accumulation_steps", steps) is None
            made[steps] = contents(tmp_path / f"whole{steps}")
    return made


# 1-4: in the first epoch and at its end; 5-9: in its test; 10-13: in the second epoch; 14-18: in
# its test
@pytest.mark.parametrize("call", [1, 4, 5, 10, 13, 18])
def test_stopped_anywhere_and_resumed_is_the_same_run(train, whole, tmp_path, call, capsys):
    accumulation = 1 + call % 2
    flags = ["--gradient_accumulation_steps", accumulation]
    assert train("run", *flags, stop_at_call=call) == EXIT_REQUEUE
    assert "is saved; to continue: " in capsys.readouterr().out
    assert train("run", *flags, "--resume") is None
    assert contents(tmp_path / "run") == whole[accumulation]


def test_stopped_twice_in_one_epoch(train, whole, tmp_path):
    assert train("run", stop_at_call=2) == EXIT_REQUEUE
    assert train("run", "--resume", stop_at_call=1) == EXIT_REQUEUE
    assert train("run", "--resume", "--checkpoint_every", 1, "--log_every", 3) is None
    assert contents(tmp_path / "run") == whole[1]


def test_resume_without_a_checkpoint_starts_from_scratch(train, whole, tmp_path):
    assert train("run", "--resume") is None
    assert contents(tmp_path / "run") == whole[1]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--keep_checkpoints", 0], [4, 8]),  # without --checkpoint_every, one at the end of each epoch
        (["--checkpoint_every", 1, "--keep_checkpoints", 3], [6, 7, 8]),
    ],
)
def test_old_checkpoints_go_and_the_newest_stay(train, tmp_path, flags, steps):
    train("run", *flags)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        f"step_{n:08d}" for n in steps
    ]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--virtual_processes", 4], "virtual_processes was 0 and is 4"),
        (["--lr", 0.1], "lr was 0.006 and is 0.1"),
        (["--dataset", str(ROOT / "data" / "mnist")], "data.train was 1003 and is 60000"),
    ],
)
def test_different_arguments_are_refused_by_both_values(train, tmp_path, capsys, flags, sentence):
    train("run", stop_at_call=2)
    before = sorted((tmp_path / "run").rglob("*"))
    assert train("run", "--resume", *flags) == 2
    assert sentence in capsys.readouterr().err
    assert sorted((tmp_path / "run").rglob("*")) == before


def warm_up(steps):
    """In the place of OneCycleLR, a schedule that does not depend on the length of the run."""

    def schedule(optimizer, *_, **__):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / steps) if step else 0.1)

    return schedule


def test_a_longer_run_is_the_run_that_was_as_long_from_its_start(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.lr_scheduler, "OneCycleLR", warm_up(6))
        assert train("whole") is None
        assert train("run", "--num_epochs", 1) is None
        assert train("run", "--num_epochs", 2, "--resume") is None
        assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_new_run_is_not_started_over_damaged_checkpoints(train, tmp_path, capsys):
    train("run", stop_at_call=3)
    for file in (tmp_path / "run" / "checkpoints").glob("*/model.safetensors"):
        run_folders.truncate(file)
    for _ in range(2):
        assert train("run", "--resume") == 2
        assert "none of the 1 checkpoints in" in capsys.readouterr().err


def test_a_hostile_checkpoint_runs_no_code(train, tmp_path, capsys):
    """Each file replaced by a pickle that would leave a trace, also under a checksum that fits."""
    import hashlib
    import pickle

    from utils.checkpoint.folder import write_manifest

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    train("run", stop_at_call=3)
    newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    clean = tmp_path / "clean"
    shutil.copytree(newest, clean)
    names = [file.name for file in clean.glob("*.safetensors")]
    assert "model.safetensors" in names
    for name in names:
        shutil.copytree(clean, newest, dirs_exist_ok=True)
        (newest / name).write_bytes(pickle.dumps(Trap()))
        manifest = json.loads((newest / "manifest.json").read_text())
        del manifest["checksum"]
        manifest["sha256"][name] = hashlib.sha256((newest / name).read_bytes()).hexdigest()
        write_manifest(newest / "manifest.json", manifest)
        capsys.readouterr()
        assert train("run", "--resume") == 2
        assert f"is skipped: {name}: " in capsys.readouterr().out
        assert not (tmp_path / "trapped").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "trapped").exists()  # the trap works


def test_a_full_disk_stops_with_a_sentence_and_keeps_the_last_checkpoint(train, whole, tmp_path, capsys):
    """RLIMIT_FSIZE stands for the full disk: the kernel refuses the write in its middle, too."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert train("run", "--checkpoint_every", 1, stop_at_call=2) == EXIT_REQUEUE
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        capsys.readouterr()
        assert train("run", "--checkpoint_every", 1, "--resume") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert "step_00000003 cannot be written" in error
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]
    assert train("run", "--checkpoint_every", 1, "--resume") is None
    assert contents(tmp_path / "run") == whole[1]


def fail_from(step, monkeypatch):
    """No file of a checkpoint of `step` or later can be written; `failed` waits for the writer."""
    write, failed = disk.write_tensors, Checkpoints.failed

    def write_or_fail(path, *tensors):
        if int(path.parent.name.removeprefix(".part_step_")) >= step:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        return write(path, *tensors)

    def failed_at_once(checkpoints):
        if checkpoints.writing is not None:
            checkpoints.writing.exception(60)
        return failed(checkpoints)

    monkeypatch.setattr(disk, "write_tensors", write_or_fail)
    monkeypatch.setattr(Checkpoints, "failed", failed_at_once)


def test_a_checkpoint_that_fails_while_training_goes_on_ends_the_run(train, tmp_path, capsys, monkeypatch):
    fail_from(2, monkeypatch)
    flags = ["--checkpoint_every", 1, "--log_every", 1]
    assert train("run", *flags) == 2
    assert "step_00000002 cannot be written" in capsys.readouterr().err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_each_checkpoint_flushes_the_log_first(train, monkeypatch):
    """The lines that it counts as written are on the disk before it is whole: no resume finds fewer."""
    flushed, fsync = [], os.fsync

    def record(descriptor):
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert train("run", "--checkpoint_every", 2) is None
    order = [name for name in flushed if name in ("metrics.jsonl", "manifest.json")]
    assert order[:8] == ["metrics.jsonl", "manifest.json"] * 4


def test_a_run_whose_last_checkpoint_fails_is_not_done(train, tmp_path, capsys, monkeypatch):
    fail_from(8, monkeypatch)
    monkeypatch.setattr(Checkpoints, "failed", lambda _: False)  # nobody asks
    assert train("run") == 2
    error = capsys.readouterr().err
    assert "step_00000008 cannot be written" in error
    for name in ("summary.json", "model.safetensors"):
        assert not (tmp_path / "run" / name).exists()


def test_a_stop_is_told_when_its_checkpoint_is_on_the_disk(train, tmp_path, monkeypatch):
    from utils.failures.signals import StopSignal

    write, leave, found = disk.write_tensors, StopSignal.leave, []

    def write_slowly(*args):
        time.sleep(0.3)
        return write(*args)

    def look_and_leave(stop_signal, step):
        found.extend((tmp_path / "run" / "checkpoints").glob("step_*"))
        leave(stop_signal, step)

    monkeypatch.setattr(disk, "write_tensors", write_slowly)
    monkeypatch.setattr(StopSignal, "leave", look_and_leave)
    assert train("run", stop_at_call=3) == EXIT_REQUEUE
    assert [path.name for path in found] == ["step_00000003"]


@pytest.mark.slow
def test_no_process_waits_for_a_main_process_that_cannot_write_the_log(launcher, small_mnist):
    (launcher.folder / "run" / "metrics.jsonl").mkdir(parents=True)
    flags = ["--dataset", small_mnist, "--output_dir", "run", "--timeout_s", 100]
    done = launcher("cpu_ddp", *flags, check=False)
    assert done.returncode != 0
    assert "error: run/metrics.jsonl: Is a directory" in done.stderr
    assert "lost another process" not in done.stderr
