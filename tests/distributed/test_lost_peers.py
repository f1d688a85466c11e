"""A lost peer is one sentence on each process that notices; a bug keeps its traceback."""

import json
import sys
from types import SimpleNamespace

import pytest

from utils.errors import explain_errors
from utils.extras import lost_peers as peers


@pytest.fixture
def on_alpha(monkeypatch):
    """This process is rank 1 of 4 on three machines: alpha, alpha, beta, gamma."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "alpha")
    monkeypatch.setattr(peers, "own_address", lambda: "10.0.0.1")
    others = [("beta", "10.0.0.11"), ("gamma", "10.0.0.111")]

    def gather(mine):
        return [*mine, *mine, *({"host": host, "address": address} for host, address in others)]

    monkeypatch.setattr(peers, "gather_object", gather)
    return introduced(resume=False)


def introduced(**flags):
    lost_peers = peers.LostPeers(SimpleNamespace(**flags))
    explain_errors().explanations.append((peers.is_lost_peer, lost_peers.sentence))
    lost_peers.introduce()
    return lost_peers


@pytest.fixture
def said(capsys):
    def say(error):
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    return say


TIMED_OUT = RuntimeError("Timed out waiting 8001ms for recv")


def test_the_machine_that_the_error_names_is_lost(on_alpha, said):
    closed = "[/gloo/pair.cc:545] Connection closed by peer [10.0.0.111]:64. This is typically ..."
    sentence = said(RuntimeError(closed))
    assert sentence.startswith(
        "error: rank 1 on alpha lost rank 3 on gamma: Connection closed by peer [10.0.0.111]:64; to continue: "
    )
    assert sentence.endswith(" --resume\n")
    assert sentence.count("\n") == 1


def test_the_machine_that_does_not_answer_is_lost(on_alpha, said, monkeypatch):
    monkeypatch.setattr(peers, "is_up", lambda address: address == "10.0.0.11")
    assert "rank 1 on alpha lost rank 3 on gamma: Timed out" in said(TIMED_OUT)
    monkeypatch.setattr(peers, "is_up", lambda address: True)
    assert "lost another process: Timed out" in said(TIMED_OUT)


def test_a_script_that_cannot_resume_gets_no_command(on_alpha, said, monkeypatch):
    monkeypatch.setattr(peers, "is_up", lambda address: True)
    introduced()
    assert said(TIMED_OUT).endswith(": Timed out waiting 8001ms for recv\n")


def test_the_launcher_gets_the_sentence(on_alpha, said, monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "is_up", lambda address: True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    sentence = said(TIMED_OUT)
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"]["message"] == sentence.strip()


@pytest.mark.parametrize(
    "words",
    [
        "Connection closed by peer [10.0.0.11]:64",
        "Read error [10.0.0.11]:64: Connection reset by peer",
        "Connect to [10.0.0.11]:64: Connection refused",
        "writev [10.0.0.11]:64: Broken pipe",
        "Connect to [10.0.0.11]:64: No route to host",
        "Connect to [10.0.0.11]:64: Network is unreachable",
        "Connect to [10.0.0.11]:64: Connection timed out",
        "NCCL error: remote process exited or there was a network error, 10.0.0.11",
    ],
)
def test_whatever_a_network_says_of_a_process_that_is_gone_is_a_lost_peer(on_alpha, said, words):
    assert said(RuntimeError(words)).startswith(f"error: rank 1 on alpha lost rank 2 on beta: {words}; to continue: ")


def test_a_bug_keeps_its_traceback(on_alpha, said):
    for bug in (RuntimeError("mat1 and mat2 shapes differ"), KeyError("connection closed")):
        assert said(bug).startswith(type(bug).__name__)


def test_the_command_to_continue_names_a_folder_that_was_made_for_the_run(on_alpha, said, monkeypatch):
    monkeypatch.setattr(peers, "is_up", lambda address: True)
    on_alpha.args.output_dir = "runs/new"
    assert said(TIMED_OUT).endswith(" --output_dir runs/new --resume\n")


def test_a_rank_that_was_waited_for_is_named_too(on_alpha, said, monkeypatch):
    monkeypatch.setattr(peers, "is_up", lambda address: True)
    on_alpha.who_is_late = lambda: "rank 2 slept"
    assert ": Timed out waiting 8001ms for recv; rank 2 slept; " in said(TIMED_OUT)


def test_a_machine_that_refuses_a_connection_is_up():
    assert peers.is_up("127.0.0.1")


def test_gloo_is_bound_to_the_interface_of_the_route(monkeypatch):
    monkeypatch.setattr(peers, "own_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    peers.bind_gloo_to_the_route()
    assert peers.os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    peers.bind_gloo_to_the_route()
    interface = peers.os.environ["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [each.address for each in peers.psutil.net_if_addrs()[interface]]
