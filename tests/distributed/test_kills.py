"""A run that is killed, or cannot write. Of one with shards, some ranks have written their part of a checkpoint, and
others not."""

import errno
import os
import random
import shutil
import signal
import sys
import threading
import time

import pytest
import run_many
import run_reader
from hosts import free_port
from run_reader import is_writing

from tests.programs import mlp
from utils.checkpoint import folder as disk

KILLS = int(os.environ.get("KILLS", 5))
ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "CUDA_VISIBLE_DEVICES": "-1,-1",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "1000",
}
# 40 steps; fc1 has 16 rows, which 3 ranks share unevenly, and fc2 10.
FLAGS = ["--batch_size", 300, "--num_epochs", 10, "--hidden", 16, "--dropout", 0.1]
FLAGS += ["--checkpoint_every", 1, "--keep_checkpoints", 0, "--log_every", 3]


def train(flags):
    """The main of programs/mlp.py; returns the exit code. An end by an error does not wait for the other ranks."""
    sys.argv = ["mlp.py", *map(str, flags)]
    try:
        mlp.main()
    except SystemExit as stopped:
        return stopped.code
    except RuntimeError as error:
        print(error)
        return 1
    return 0


def start(world, folder, flags, shards=None):
    """The ranks of a run, each in a child of this process; what they print goes to `folder`/log. Returns their ids."""
    port, children = free_port(), []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            if world > 1:
                os.environ.update(ENVIRONMENT, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
                os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
            if shards:
                os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
                os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(world // shards)
                os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(shards)
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os._exit(train(flags))
        finally:
            os._exit(99)
    return children


def is_alive(child) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def written(run) -> int:
    """How many checkpoints are complete."""
    return len(list((run / "checkpoints").glob("step_*")))


def ended(children, seconds):
    """Wait for processes; those that do not end are killed. Returns their exit codes, and whether all have ended."""
    codes, until = {}, time.monotonic() + seconds
    while len(codes) < len(children) and time.monotonic() < until:
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - codes.keys():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return codes, len(codes) == len(children)


def assert_same(run, whole):
    """Final models, last checkpoints and logs."""
    assert run_reader.final_models(run) == run_reader.final_models(whole)
    last = [run_reader.last_checkpoint(each) for each in (run, whole)]
    files = [{file.name: run_reader.sha256(file) for file in each.glob("*.safetensors")} for each in last]
    assert files[0] == files[1]
    assert run_reader.lines(run) == run_reader.lines(whole)
    assert not list((run / "checkpoints").glob(".part_*"))


@pytest.fixture
def whole(tmp_path, small_mnist, home):
    """Returns a function that gives the folder of a run that nothing happens to, and the flags of all runs."""
    flags = ["--dataset", small_mnist, *FLAGS, "--output_dir"]
    run_many.run("mlp", [*flags, tmp_path / "first", "--max_steps", 1])  # imports what all ranks need

    def run_whole(world, shards=None):
        codes, _ = ended(start(world, tmp_path, [*flags, tmp_path / "whole"], shards), 120)
        assert set(codes.values()) == {0}, (tmp_path / "log").read_text()[-3000:]
        return tmp_path / "whole", flags

    return run_whole


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shards", "kills"), [(1, None, 20), (3, None, KILLS), (4, 2, KILLS)])
def test_kills_of_random_ranks_change_nothing(world, shards, kills, tmp_path, whole):
    """Each after some more checkpoints, three of four while the next one is being written."""
    rng, run, log = random.Random(world), tmp_path / "run", tmp_path / "log"
    expected, flags = whole(world, shards)
    killed = unfinished = 0
    while killed < kills or unfinished < kills // 5:
        children = start(world, tmp_path, [*flags, run, "--resume"], shards)
        victim, enough, in_write = rng.choice(children), written(run) + rng.randint(1, 3), killed % 4 > 0
        until = time.monotonic() + 120
        while is_alive(victim) and (written(run) < enough or (in_write and not is_writing(run))):
            time.sleep(0.001)
            assert time.monotonic() < until, log.read_text()[-3000:]
        os.kill(victim, signal.SIGKILL)
        for child in set(children) - {victim}:  # as torchrun does
            os.kill(child, signal.SIGTERM)
        codes, all_ended = ended(children, 60)
        assert all_ended, log.read_text()[-3000:]  # the others must not wait for it
        assert codes[victim] in (0, -signal.SIGKILL), log.read_text()[-3000:]
        if codes[victim] == 0:  # it ended before the kill: take its end away, and half of its checkpoints
            for name in ("summary.json", "model.safetensors"):
                (run / name).unlink(missing_ok=True)
            for path in sorted((run / "checkpoints").glob("step_*"))[20:]:
                shutil.rmtree(path)
        else:
            killed += 1
            unfinished += is_writing(run)
    codes, _ = ended(start(world, tmp_path, [*flags, run, "--resume"], shards), 120)
    assert set(codes.values()) == {0}, log.read_text()[-3000:]
    resumed = sum(launch["from_step"] > 0 for launch in run_reader.launches(run))
    print(f"{killed} kills, {unfinished} of them in the middle of a checkpoint, {resumed} resumes")
    assert resumed >= kills
    assert_same(run, expected)
    assert len(list(run_reader.last_checkpoint(run).glob("*.safetensors"))) == 2 * (shards or world)  # of a replica


def test_a_second_ctrl_c_stops_at_once_and_harms_nothing(tmp_path, whole, monkeypatch):
    write, run, log = disk.write_tensors, tmp_path / "run", tmp_path / "log"
    expected, flags = whole(1)

    def write_one_file(*args):
        """The first file is written, and the second one not while this test runs."""
        until = time.monotonic() + 600
        while is_writing(run) and time.monotonic() < until:
            time.sleep(0.05)
            # Python does not handle a signal that came just before a wait, here for this thread, until another comes.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_tensors", write_one_file)
        (child,) = start(1, tmp_path, [*flags, run])
    for has_come in (lambda: is_writing(run), lambda: "press Ctrl-C again" in log.read_text()):
        until = time.monotonic() + 120
        while not has_come():
            time.sleep(0.01)
            assert is_alive(child), log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
        os.kill(child, signal.SIGINT)  # one after the other: two signals at a time would be one
    assert ended([child], 60)[0] == {child: 130}
    assert not list((run / "checkpoints").glob("step_*"))
    assert set(ended(start(1, tmp_path, [*flags, run, "--resume"]), 60)[0].values()) == {0}
    assert_same(run, expected)


def no_space(monkeypatch):
    write = disk.write_tensors

    def write_or_fail(path, *args):
        if path.name == "model.rank_1.safetensors" and path.parent.name.endswith("3"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args)

    monkeypatch.setattr(disk, "write_tensors", write_or_fail)


def other_folder(monkeypatch):
    """Rank 1 is on a machine without rank 0's folder."""
    temporary_path, rank = disk.temporary_path, lambda: os.environ["RANK"].strip("0")
    monkeypatch.setattr(disk, "temporary_path", lambda path: temporary_path(path.parent / rank() / path.name))


def damaged_part(folder):
    """Of the newest checkpoint; each rank looks at some of the files."""
    newest = max((folder / "checkpoints").glob("step_*"))
    file = newest / "model.safetensors"  # its SHA-256 is checked by rank 1
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "step", "sentence"),
    [
        (no_space, 2, "step_00000003 cannot be written (No space left on device): --resume goes on from the"),
        (other_folder, None, "is not the folder of rank 0: "),
    ],
)
def test_a_rank_that_cannot_write_ends_the_run_with_a_sentence(fault, step, sentence, tmp_path, small_mnist, home):
    flags = ["--dataset", small_mnist, *FLAGS, "--output_dir", tmp_path / "run"]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        codes, _ = ended(start(2, tmp_path, flags), 120)
    log = (tmp_path / "log").read_text()
    assert list(codes.values()) == [2, 2], log[-3000:]
    assert log.count("error: ") == 1, log[-3000:]
    assert sentence in log
    found = [run_reader.checkpoint(path)[0]["step"] for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert max(found, default=None) == step
    if step is None:
        return
    damaged_part(tmp_path / "run")
    codes, _ = ended(start(2, tmp_path, [*flags, "--resume"]), 120)
    log = (tmp_path / "log").read_text()
    assert list(codes.values()) == [0, 0], log[-3000:]
    assert "step_00000002 is skipped: model.safetensors: its SHA-256 is not the one" in log
    assert (tmp_path / "run" / "checkpoints" / "damaged_step_00000002").is_dir()
