"""doctor --gpus with the CPU in the place of GPUs."""

import os
import subprocess
import sys

import pytest
from conftest import free_port

from tools import doctor
from tools.doctor import gpus
from tools.doctor.data_sheets import peak_tflops

HANGS = """
import os, sys, json
if os.environ.get("NCCL_P2P_DISABLE") != "1" or "always" in sys.argv[1]:
    print("hangs", flush=True)
    os._exit(1)
if os.environ["RANK"] == "0":
    print(json.dumps({"gb_per_s": 2.5, "right": True}))
"""


@pytest.mark.slow
def test_each_pair_and_the_sum_of_all_are_measured():
    lines = list(gpus.check(stand_ins=2))
    assert [kind for kind, _ in lines] == [""] * 5
    starts = ["GPU 0, CPU: ", "GPU 1, CPU: ", "GPU 0 to 1: ", "GPU 1 to 0: ", "all-reduce over 2 GPUs, gloo: "]
    assert all(line.startswith(start) for (_, line), start in zip(lines, starts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sentence"),
    [
        ("sometimes", "With NCCL_P2P_DISABLE=1 it works: 2.5 GB/s: set NCCL_P2P_DISABLE=1 in the environment"),
        ("always", "also with NCCL_P2P_DISABLE=1. NCCL_DEBUG=INFO prints why"),
    ],
)
def test_an_all_reduce_that_hangs_is_tried_without_direct_copies(backend, sentence, tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setattr(gpus, "PROGRAM", tmp_path / "hangs.py")
    ((kind, line),) = gpus.check_all_reduce(2, backend)
    assert kind == "error"
    assert line.startswith(f"all-reduce over 2 GPUs, {backend} hangs for 20 s")
    assert sentence in line


def test_a_process_that_waits_for_another_says_so_and_ends():
    """Rank 0 of two, whose other rank never comes."""
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, gpus.PROGRAM, "gloo", "2"],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (1, "hangs\n")


def test_a_wrong_sum_and_a_program_that_fails(monkeypatch):
    monkeypatch.setattr(gpus, "all_reduce", lambda *args, **more: {"gb_per_s": 1.0, "right": False})
    ((kind, line),) = gpus.check_all_reduce(2, "nccl")
    assert (kind, "WRONG" in line) == ("error", True)
    monkeypatch.setattr(gpus, "all_reduce", lambda *args, **more: "RuntimeError: no such backend")
    ((kind, line),) = gpus.check_all_reduce(2, "nccl")
    assert (kind, "fails: RuntimeError: no such backend, also with" in line) == ("error", True)


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A10G", 70), ("Tesla T4", 65), ("GTX 1080", None)]
)
def test_what_a_card_should_do(name, peak, monkeypatch):
    assert peak_tflops(name) == peak
    monkeypatch.setattr(gpus, "name_of", lambda device: name)
    monkeypatch.setattr(gpus, "product_tflops", lambda device: 10.0)
    ((kind, line),) = gpus.check(stand_ins=1)
    assert kind == ("warning" if peak else "")
    assert f"{10 / peak:.0%} of {peak:g}" in line if peak else "not known" in line


def test_no_gpu_is_an_error_and_stand_ins_reach_the_report(monkeypatch, capsys):
    monkeypatch.setattr(gpus.torch.cuda, "device_count", lambda: 0)
    assert [kind for kind, _ in gpus.check()] == ["error"]
    monkeypatch.setattr(gpus, "check", lambda stand_ins: [("", f"{stand_ins} measured"), ("error", "bad")])
    monkeypatch.setattr(sys, "argv", ["doctor", "--gpus", "--stand_ins", "2"])
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "2 measured" in printed
    assert "error: bad" in printed
