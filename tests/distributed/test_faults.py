"""What can go wrong between two machines: each fault ends on both, in time, and says where;
--resume goes on from it.

Two machines as in hosts.py, with one process each where that is enough.
"""

import sys
import time

import pytest
import run_many
import run_reader
from conftest import ROOT, free_port

pytestmark = pytest.mark.slow
FLAGS = ["--max_steps", 1500, "--batch_size", 64, "--log_every", 20, "--checkpoint_every", 50]
FLAGS += ["--output_dir", "run"]
TIMEOUT_S = 8


@pytest.fixture
def flags(small_mnist):
    return [*FLAGS, "--dataset", small_mnist, "--timeout_s", TIMEOUT_S]


@pytest.fixture(scope="module")
def whole(shared_launcher, small_mnist):
    """The run that nothing happens to, on one machine: the sum of two processes is the same
    wherever they are."""
    shared_launcher("cpu_ddp", *FLAGS, "--dataset", small_mnist)
    return shared_launcher.folder / "run"


def shown(name, hosts, codes, seconds):
    """A row of the table in guides/reference/faults.md (pytest -rP)."""
    print(f"{name}: exit codes {codes} after {seconds} s")
    for host in (0, 1):
        lines = [line for line in hosts.log(host).splitlines() if "rror: " in line or "exitcode  :" in line]
        lines = [line for line in lines if "error: " in line] or lines
        print(f"  {host}: {lines[-1].partition('; to go on')[0] if lines else '(nothing)'}")


def test_launchers_that_do_not_find_each_other_end(hosts, flags, tmp_path):
    rdzv = ["--rdzv_conf", "timeout=4"]
    port = free_port()
    serve = f"import socket, time; other = socket.create_server(('127.0.0.1', {port})); print('listens', flush=True)"
    hosts.start(0, sys.executable, "-c", f"{serve}; time.sleep(99)", log="other")
    while "listens" not in (tmp_path / "other").read_text():
        time.sleep(0.05)

    # Two cases at the same time. Machine 0 waits for one that never comes, since machine 1 has the wrong address.
    wrong = {"launch_flags": ["--main_process_ip", "10.77.0.9"]}
    waiting = hosts.launch(*flags, launch_flags=rdzv, each=[{}, wrong])
    hosts.folder = tmp_path / "in_use"
    hosts.folder.mkdir()
    # Another run has the port.
    running = hosts.launch(*flags, launch_flags=[*rdzv, "--main_process_port", port])
    codes, seconds = hosts.end(running, 60)
    shown("port in use", hosts, codes, seconds)
    assert codes == [1, 1]
    assert f"port `{port}`, but another process is utilizing it" in hosts.log(0)
    hosts.folder = tmp_path
    codes, seconds = hosts.end(waiting, 60)
    shown("wrong address, a host that never comes", hosts, codes, seconds)
    assert codes == [1, 1]
    assert "1/2 clients joined" in hosts.log(0)
    nobody_answers = ("failed to connect to any network address of (10.77.0.9", "No route to host")  # what ends first
    assert any(text in hosts.log(1).splitlines()[-1] for text in nobody_answers), hosts.log(1)[-3000:]


def test_hosts_that_differ_end_before_training(hosts, flags, small_mnist, tmp_path):
    """Other arguments, other data, and a flag that machine 1 alone does not know, in one launch."""
    (tmp_path / "other_data").mkdir()
    for file in small_mnist.iterdir():
        split = file.name.partition("-")[0]
        other = next(small_mnist.glob("test-*")) if split == "train" else file
        (tmp_path / "other_data" / file.name).write_bytes(other.read_bytes())
    differ = ["--lr", 0.1], ["--dataset", tmp_path / "other_data"], ["--no_such_flag"]
    each = [{"flags": run_many.words("mnist_mlp", *[[*flags, *own] for own in runs])} for runs in ([[]] * 3, differ)]
    script = ROOT / "tests" / "programs" / "differs.py"
    codes, seconds = hosts.ends(hosts.launch(each=each, script=script), 60)
    shown("other arguments, other data, bad flag", hosts, codes, seconds)
    assert codes == [1, 1]
    arguments = "rank 1 on beta has lr 0.1, not 0.006 as rank 0 on alpha"
    data = "rank 1 on beta has train 203, not 1003; fingerprint "
    for errors in ([error for error in hosts.errors(host) if " lost " not in error] for host in (0, 1)):
        assert [error.startswith(text) for error, text in zip(errors, (arguments, data), strict=True)] == [True, True]
    assert "unrecognized arguments: --no_such_flag" in hosts.log(1)
    assert "rank 0 on alpha lost another process" in hosts.log(0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_goes_on_after_a_worker_a_host_and_a_link_are_lost(hosts, flags, whole, tmp_path):
    """One run, hit four times, has the weights of one that was left alone.

    It is resumed each time; the last time without a person, after the process that has the checkpoints was killed.
    A fault comes when the second checkpoint of a launch has begun, so the first is complete on any disk.
    """
    for step, name, fault in (
        (120, "process killed", lambda: hosts.kill(1, only_ranks=True)),
        (220, "host killed", lambda: hosts.kill(1)),
        (320, "link cut", lambda: hosts.network.plug("down")),
    ):
        running = hosts.launch(*flags, "--resume")
        hosts.wait_for(f"step {step}/")
        fault()
        codes, seconds = hosts.ends(running, TIMEOUT_S + 45)  # the launchers look every 0.1 s, and wait for SIGTERM
        hosts.network.plug("up")
        shown(name, hosts, codes, seconds)
        assert codes[0] == 1
        assert codes[1] != 0
        assert hosts.errors(0)[0].startswith("rank 0 on alpha lost another process at ")
        if name == "process killed":  # its launcher says so
            assert "exitcode  : -9" in hosts.log(1)
            assert "host      : beta" in hosts.log(1)
        if name == "link cut":
            assert hosts.errors(1)[0].startswith("rank 1 on beta lost another process at ")
            assert "Timed out waiting" in hosts.errors(1)[0]
    restarts = ["--rdzv_backend", "c10d", "--max_restarts", 1]
    running = hosts.launch(
        *flags, "--resume", "--timeout_s", 60, launch_flags=restarts, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    hosts.wait_for("step 420/")
    hosts.kill(0, only_ranks=True)
    assert hosts.ends(running)[0] == [0, 0], hosts.tails()
    launches = run_reader.launches(tmp_path / "run")
    resumed_from = [launch["from_step"] for launch in launches[1:]]
    assert all(at <= step < 1500 for at, step in zip([50, 150, 250, 350], resumed_from, strict=True))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses(tmp_path / "run") == losses(whole)


def losses(run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run_reader.lines(run)]
