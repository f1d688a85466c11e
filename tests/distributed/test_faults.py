"""What can go wrong between two machines: each fault ends on both, in time, and says where;
--resume goes on from it.

Two machines as in hosts.py, with one process each where that is enough.
"""

import sys
import time

import pytest
import run_reader
from conftest import free_port

pytestmark = pytest.mark.slow
FLAGS = ["--max_steps", 1000, "--batch_size", 64, "--log_every", 20, "--checkpoint_every", 50]
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


def test_what_is_wrong_before_training_ends_on_both_hosts(hosts, flags, small_mnist, tmp_path):
    rdzv = ["--rdzv_conf", "timeout=4"]

    # Machine 0 waits for one that never comes, since machine 1 was given the wrong address.
    wrong = {"launch_flags": ["--main_process_ip", "10.77.0.9"]}
    running = hosts.launch(*flags, launch_flags=rdzv, each=[{}, wrong])
    codes, seconds = hosts.ends(running, 60)
    shown("wrong address, a host that never comes", hosts, codes, seconds)
    assert codes == [1, 1]
    assert "1/2 clients joined" in hosts.log(0)
    nobody_answers = ("failed to connect to any network address of (10.77.0.9", "No route to host")  # what ends first
    assert any(text in hosts.log(1).splitlines()[-1] for text in nobody_answers), hosts.log(1)[-3000:]

    # Another run has the port.
    port = free_port()
    serve = f"torch.distributed.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False)"
    code = f"import time, torch; store = {serve}; print('listens', flush=True); time.sleep(99)"
    other = hosts.start(0, sys.executable, "-c", code, log="other")
    while "listens" not in (tmp_path / "other").read_text():
        assert other.poll() is None
        time.sleep(0.05)
    running = hosts.launch(*flags, launch_flags=[*rdzv, "--main_process_port", port])
    codes, seconds = hosts.end(running, 60)
    shown("port in use", hosts, codes, seconds)
    hosts.kill(0)
    assert codes == [1, 1]
    assert f"port `{port}`, but another process is utilizing it" in hosts.log(0)

    # Other arguments, other data, and a flag that machine 1 alone does not know.
    (tmp_path / "other_data").mkdir()
    for file in small_mnist.iterdir():
        split = file.name.partition("-")[0]
        other = next(small_mnist.glob("test-*")) if split == "train" else file
        (tmp_path / "other_data" / file.name).write_bytes(other.read_bytes())
    arguments = "rank 1 on beta has lr 0.1, not 0.006 as rank 0 on alpha"
    data = "rank 1 on beta has train 203, not 1003; fingerprint "
    for name, own, sentence in (
        ("other arguments", ["--lr", 0.1], arguments),
        ("other data", ["--dataset", tmp_path / "other_data"], data),
        ("bad flag", ["--no_such_flag"], None),
    ):
        codes, seconds = hosts.ends(hosts.launch(*flags, each=[{}, {"flags": own}]), 60)
        shown(name, hosts, codes, seconds)
        assert codes == [1, 1]
        if sentence:
            said = [hosts.errors(host) for host in (0, 1)]
            assert [len(errors) for errors in said] == [1, 1]  # once a machine
            assert all(errors[0].startswith(sentence) for errors in said)
    assert "unrecognized arguments: --no_such_flag" in hosts.log(1)
    assert "rank 0 on alpha lost another process" in hosts.log(0)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_goes_on_after_a_worker_a_host_and_a_link_are_lost(hosts, flags, whole, tmp_path):
    """One run, hit three times and resumed each time, has the weights of one that was left
    alone."""
    for step, name, fault, lost in (
        (100, "worker killed", lambda: hosts.kill(1, LOCAL_RANK=0), "rank 0 on alpha lost rank 1 on beta at "),
        (200, "host killed", lambda: hosts.kill(1), "rank 0 on alpha lost rank 1 on beta at "),
        (300, "link cut", lambda: hosts.network.plug("down"), "rank 0 on alpha lost rank 1 on beta at "),
    ):
        running = hosts.launch(*flags, "--resume")
        hosts.wait_for(f"step {step}/")
        fault()
        codes, seconds = hosts.ends(running, TIMEOUT_S + 45)  # the launchers look every 0.1 s, and wait for SIGTERM
        hosts.network.plug("up")
        shown(name, hosts, codes, seconds)
        assert codes[0] == 1
        assert codes[1] != 0
        assert hosts.errors(0)[0].startswith(lost)
        assert hosts.errors(0)[0].endswith(" --resume")
        if name == "worker killed":  # its launcher says so
            assert "exitcode  : -9" in hosts.log(1)
            assert "host      : beta" in hosts.log(1)
        if name == "link cut":
            assert hosts.errors(1)[0].startswith("rank 1 on beta lost rank 0 on alpha at ")
            assert "Timed out waiting" in hosts.errors(1)[0]
    running = hosts.launch(*flags, "--resume", "--timeout_s", 60)
    assert hosts.ends(running)[0] == [0, 0], hosts.log(0) + hosts.log(1)
    launches = run_reader.launches(tmp_path / "run")
    resumed_from = [launch["from_step"] for launch in launches[1:]]
    assert all(at <= step < 1000 for at, step in zip([50, 150, 250], resumed_from, strict=True))
    same_run(whole, tmp_path / "run")


def losses(run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run_reader.lines(run)]


def same_run(whole, resumed):
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses(resumed) == losses(whole)


def test_a_killed_worker_is_restarted_without_a_person(hosts, flags, whole, tmp_path):
    """The process that has the checkpoints and the metrics; nobody types --resume."""
    running = hosts.launch(
        *flags, launch_flags=["--rdzv_backend", "c10d", "--max_restarts", 1], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
    )
    hosts.wait_for("step 60/")
    hosts.kill(0, RANK=0)
    assert hosts.ends(running)[0] == [0, 0], hosts.log(0)[-5000:] + hosts.log(1)[-5000:]
    restart = run_reader.launches(tmp_path / "run")[1]
    assert restart["from_step"] >= 50
    same_run(whole, tmp_path / "run")


def test_restarts_that_would_hang_are_refused(launcher):
    done = launcher("cpu_ddp", launch_flags=["--max_restarts", 1], check=False)
    assert "error: --max_restarts needs --rdzv_backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: " in done.stderr
