"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C, to the launcher or to one worker.

All ranks save together, and nothing is lost.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import run_many
import run_reader
import torch
from conftest import ROOT
from fakes import fake_accelerator

from utils.failures import signals
from utils.loader import GlobalLoader
from utils.run import Run

FLAGS = ["--hidden", 32, "--batch_size", 128, "--log_every", 100, "--output_dir", "run"]


def workers(process, count: int) -> list[psutil.Process]:
    """The processes that the launcher has started, which come in the order of their ranks."""
    found = sorted(psutil.Process(process.pid).children(), key=lambda worker: worker.pid)
    assert len(found) == count
    return found


def wait_for_line(process, word: str) -> str:
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"ended without {word}: {process.stderr.read()[-3000:]}")


STOPS = {
    "cpu": ["launcher SIGTERM"],
    # SIGUSR1 ends torchrun as SIGKILL does; it sends SIGTERM on to its processes.
    "cpu_ddp": ["worker SIGUSR1", "launcher SIGTERM", "launcher SIGUSR1", "group SIGINT"],
}


@pytest.mark.slow
@pytest.mark.parametrize("config", STOPS)
def test_a_signal_saves_and_ends_every_process(launcher, config):
    """One run, stopped in each way and resumed each time. It saves only then and at the end.

    Until the last launch, it is so long that it cannot end before the signal: the script has no schedule.
    """
    flags = ["--checkpoint_every", 10**6, "--log_every", 100, "--output_dir", "run", "--resume"]
    run, saved, lines = launcher.folder / "run", 0, []
    for stop in STOPS[config]:
        target, name = stop.split()
        process = launcher.fork(config, *flags, "--num_epochs", 10**6, script="regression")
        shown = int(wait_for_line(process, "train epoch").partition("step ")[2].partition("/")[0])
        ranks = workers(process, 2 if config == "cpu_ddp" else 1)
        number = getattr(signal, name)
        if target == "group":
            os.killpg(process.pid, number)  # as Ctrl-C does in a terminal
        else:
            (ranks[-1] if target == "worker" else process).send_signal(number)
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive, stop
        process.communicate(timeout=30)
        assert process.returncode != 0, stop
        launch = run_reader.launches(run)[-1]
        assert launch["from_step"] == saved, stop
        saved = max(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
        assert launch["from_step"] < shown <= saved, stop
        assert not (run / "summary.json").exists()
        before = lines
        lines = run_reader.lines(run, timings=True)
        assert lines[: len(before)] == before, stop
    done = launcher(config, *flags, "--num_epochs", saved // 6 + 30, script="regression")
    assert "done: " in done.stdout
    assert run_reader.launches(run)[-1]["from_step"] == saved
    after = run_reader.lines(run, timings=True)
    assert after[: len(lines)] == lines
    steps = [line["step"] for line in after if line["split"] == "train"]
    assert steps == sorted(set(steps))  # none twice


@pytest.mark.slow
def test_a_launcher_killed_while_its_processes_import_leaves_none(launcher, small_mnist):
    # A fork of the tests has imported everything already, and would end by the kernel's signal, without a word.
    flags = ["--dataset", small_mnist, *FLAGS, "--num_epochs", 5000]
    process = launcher.start("cpu_ddp", *flags)
    ranks = []
    while len(ranks) < 2:
        time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if is_script(child)]
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert "error: the launcher was killed: start the run again" in process.stderr.read()
    assert not (launcher.folder / "run").exists()


@pytest.mark.slow
def test_the_processes_of_fsdp_end_soon_after_their_launcher_is_killed(launcher, small_mnist):
    # They are told to save, and cannot: the launcher had the store through which the parts of a checkpoint are agreed.
    flags = ["--dataset", small_mnist, *FLAGS, "--num_epochs", 10**5, "--checkpoint_every", 10**6]
    process = launcher.fork("cpu_fsdp", *flags)
    wait_for_line(process, "train epoch")
    ranks = workers(process, 2)
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert "lost another process" in process.stderr.read()


STUCK = ROOT / "tests" / "programs" / "stuck_step.py"


def stuck_processes(launcher, *flags):
    process = launcher.fork("cpu_ddp", *flags, script=STUCK.with_suffix(""))
    wait_for_line(process, "stuck")
    return process, workers(process, 2)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_every_process_at_once(launcher):
    process, ranks = stuck_processes(launcher)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does in a terminal
    until = time.monotonic() + 60
    while len(list(launcher.folder.glob("stops_*"))) < 2:  # two signals at a time would be one
        time.sleep(0.01)
        assert time.monotonic() < until
    assert all(rank.is_running() for rank in ranks)
    os.killpg(process.pid, signal.SIGINT)
    _, alive = psutil.wait_procs(ranks, timeout=15)  # torchrun would kill them after 30 s
    assert not alive
    _, said = process.communicate(timeout=30)
    assert said.count("press Ctrl-C again") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_process_that_is_stuck_ends_after_its_launcher(launcher):
    process, ranks = stuck_processes(launcher, "--timeout_s", 3, "--as_for_a_gpu")
    began = time.monotonic()
    process.kill()
    ended = []
    psutil.wait_procs(ranks, timeout=60, callback=lambda _: ended.append(time.monotonic() - began))
    assert len(ended) == 2
    assert min(ended) > 3  # a save may take its time


class DeathSignals(torch.utils.data.Dataset):
    """By item, the signal that the kernel sends to the process that reads it when its parent ends."""

    fingerprint = "death signals"

    def __len__(self):
        return 2

    def __getitem__(self, index):
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG of prctl(2)
        return number.value


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_data_worker_that_is_stuck_in_a_read_ends_with_its_process():
    (batch,) = GlobalLoader(DeathSignals(), 2, fake_accelerator(), num_workers=1)
    assert batch.data.tolist() == [signal.SIGKILL] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are spawned")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_a_process_and_its_data_workers_saves(tmp_path, small_mnist, monkeypatch, name):
    here, step_done = psutil.Process(), Run._step_done
    others = here.children()

    def step_done_with_signal(run, epoch):
        if run.step == 4:
            workers = [child.pid for child in here.children() if child not in others]
            for pid in (*workers, here.pid):  # not from here: DataLoader itself sends its workers SIGTERM
                subprocess.run(["kill", f"-{name[3:]}", str(pid)], check=True)
                time.sleep(0.05)
        step_done(run, epoch)

    monkeypatch.setattr(Run, "_step_done", step_done_with_signal)
    flags = ["--dataset", small_mnist, "--num_workers", 2, "--batch_size", 8, "--gradient_accumulation_steps", 2]
    assert run_many.run("mlp", [*flags, "--output_dir", tmp_path / "run"]) == signals.EXIT_REQUEUE
    assert run_reader.last_checkpoint(tmp_path / "run").name == "step_00000005"


def is_script(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("mnist_mlp.py") for word in process.cmdline()[:3])
    except psutil.Error:  # it has just ended
        return False


@pytest.mark.parametrize(
    ("nohup", "torchrun", "stops"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_nohup_keeps_a_run_alive_unless_torchrun_ends_it(monkeypatch, nohup, torchrun, stops):
    """torchrun sends SIGHUP on to its processes, and kills those that have not ended after 30 s."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    stop_signal = signals.StopSignal(fake_accelerator())
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop_signal.agreed() == stops


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_asks_for_a_stop(name):
    stop_signal = signals.StopSignal(fake_accelerator())
    assert not stop_signal.agreed()
    os.kill(os.getpid(), getattr(signal, name))
    assert stop_signal.agreed()
    assert signals.StopSignal(fake_accelerator()).agreed()  # it came after the last step of a run: the next one stops


def test_the_launcher_is_told_why_the_processes_ended(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        signals.StopSignal(fake_accelerator(rank=1)).leave(step=7)
    assert ended.value.code == signals.EXIT_REQUEUE
    report = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert (
        report == "stopped by a signal; step 7 is saved; to continue: the same command with --resume --output_dir run"
    )
    assert capsys.readouterr().out == ""  # the main process prints it


def test_ctrl_c_says_what_comes_of_it_and_a_second_one_ends_the_process(monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    stop_signal = signals.StopSignal(fake_accelerator())
    stop_signal.pid = -1  # as in a process that it forked
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop_signal.agreed()
    stop_signal.pid = os.getpid()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop_signal.agreed()
    assert "press Ctrl-C again" in capfd.readouterr().err
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher of one process ends at the first Ctrl-C: the kernel sends it
    assert ends == []
    os.kill(os.getpid(), signal.SIGINT)
    assert ends == [130]


@pytest.mark.slow
def test_the_exit_code_asks_for_a_requeue(small_mnist, launcher, monkeypatch):
    """The script itself ends with 75. `accelerate launch` turns every failure into 1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    flags = ["--dataset", small_mnist, *FLAGS, "--num_epochs", 10**5]
    process = launcher.start_python(ROOT / "scripts" / "mnist_mlp.py", *flags)
    wait_for_line(process, "step 100/")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == signals.EXIT_REQUEUE == 75
    assert out.strip().endswith("to continue: the same command with --resume --output_dir run")
