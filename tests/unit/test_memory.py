import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT

from utils import memory
from utils.console import explain_errors
from utils.memory import is_out_of_memory, own_peak_memory_gib, peak_memory_gib


def test_a_failed_allocation_of_a_library_is_out_of_memory():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    # What a CUDA call returns, such as the start of a context, has no full stop after it.
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"))
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous input?"))


def reset_peak() -> None:
    """Restart the measurement of this process's peak resident set size; see man 5 proc."""
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset under Linux only")
def test_the_peak_rises_with_an_allocation_stays_and_is_reset():
    device = torch.device("cpu")
    reset_peak()
    before = own_peak_memory_gib(device)
    big = torch.ones(2**26)  # 0.25 GiB
    high = own_peak_memory_gib(device)
    assert 0.2 < high - before < 0.3
    del big
    # The kernel counts on each core for itself and sums up now and then.
    assert own_peak_memory_gib(device) == pytest.approx(high, abs=0.01)
    reset_peak()
    assert own_peak_memory_gib(device) < before + 0.1


def test_the_peak_of_several_processes_is_the_largest(monkeypatch):
    monkeypatch.setattr(memory, "gather_object", lambda mine: [*mine, 1000.0, 0.5])
    assert peak_memory_gib(Accelerator(cpu=True)) == 1000


def test_the_peak_of_several_gpus_is_the_fullest_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: (2**30, 3 * 2**30, 0)[device or 0])
    assert own_peak_memory_gib(torch.device("cuda")) == 3


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."),
            ", which requested 2.50 GiB",
        ),
        (MemoryError(), ""),
    ],
)
def test_a_lack_of_memory_is_a_sentence(monkeypatch, capsys, tmp_path, error, asked):
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(memory.socket, "gethostname", lambda: "alpha")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    explain_errors((memory.is_out_of_memory, memory.advice))
    sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert said.startswith(f"error: rank 3 on alpha ran out of memory at an unknown line{asked}: use a smaller model")
    assert said.count("\n") == 1
    assert said.strip() in (tmp_path / "error.json").read_text()


@pytest.mark.slow
def test_more_weights_than_memory_are_a_sentence(tmp_path):
    words = ["--hidden", 10**9, "--output_dir", tmp_path / "run"]
    command = [sys.executable, ROOT / "scripts" / "mnist_mlp.py", *words]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    line_of_code = r"scripts/mnist_mlp.py:\d+, which requested 3136000000000 bytes: use"
    assert re.search(rf"ran out of memory at \S*{line_of_code}", line)
    assert "Traceback" not in done.stderr


def test_another_error_keeps_its_traceback(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *words: seen.append(words))
    explain_errors((memory.is_out_of_memory, memory.advice))
    for error in (RuntimeError("shapes differ"), ValueError()):
        sys.excepthook(type(error), error, None)
    assert [kind for kind, *_ in seen] == [RuntimeError, ValueError]
