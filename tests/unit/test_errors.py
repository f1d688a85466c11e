"""An error of a library that a user can do something about ends with one line; any other keeps its traceback."""

import os
import re
import sys
import traceback

import numpy as np
import pytest
import torch
from torch import distributed

from utils import launch
from utils.failures import errors
from utils.failures.errors import explain, own_line
from utils.launch import install_error_hooks


def an_array_that_does_not_fit() -> MemoryError:
    """NumPy's own class."""
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, np.float32)
    return raised.value


@pytest.mark.parametrize(
    ("error", "is_out_of_memory"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        # What a CUDA call returns, such as the start of a context, has no full stop after it.
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous input?"), False),
        (an_array_that_does_not_fit(), True),
        (ValueError("the list is out of memory"), False),
    ],
)
def test_a_failed_allocation_of_a_library_is_out_of_memory(error, is_out_of_memory):
    assert ("ran out of memory at " in (explain(error) or "")) == is_out_of_memory


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to ..."), MemoryError()])
def test_a_lack_of_memory_is_a_sentence(monkeypatch, capsys, tmp_path, error):
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(errors.socket, "gethostname", lambda: "alpha")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    install_error_hooks()
    sys.excepthook(type(error), error, None)
    of_torch, said = capsys.readouterr().err.splitlines()
    assert of_torch.startswith(traceback.format_exception_only(error)[0].split(":")[0].strip())
    assert said.startswith("error: rank 3 on alpha ran out of memory at an unknown line: use a smaller model")
    assert said in (tmp_path / "error.json").read_text()


def test_an_error_in_a_backward_pass_is_at_the_line_of_the_script():
    functions = {}
    exec(compile("def backward(loss): loss.backward()", launch.__file__, "exec"), functions)
    line = sys._getframe().f_lineno + 2
    with pytest.raises(AttributeError) as error:
        functions["backward"](loss=None)
    assert own_line(traceback.extract_tb(error.tb)) == f"{os.path.relpath(__file__)}:{line}"


# --- a process that is lost -------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch, capsys):
    """What rank 1 says of an error."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def say(error):
        install_error_hooks()
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    return say


GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:545] "


@pytest.mark.parametrize(
    ("kind", "words", "shown"),
    [
        (RuntimeError, "Connection closed by peer [10.0.0.3]:64. This is typically ...", "peer [10.0.0.3]:64"),
        (RuntimeError, "Read error [10.0.0.1]:64: Connection reset by peer", None),
        (RuntimeError, "Timed out waiting 8001ms for recv operation to complete", None),
        (RuntimeError, "NCCL communicator was aborted on rank 0.", None),
        (distributed.DistStoreError, "wait timeout after 4000ms, keys: /x", None),
        (distributed.DistNetworkError, "Connect to [10.0.0.11]:64: No route to host", None),
        (distributed.DistBackendError, "unhandled system error (run with NCCL_DEBUG=INFO for details)", None),
    ],
)
def test_a_lost_process_is_one_line(said, kind, words, shown):
    is_of_gloo = kind is RuntimeError and "NCCL" not in words
    error = kind(GLOO + words if is_of_gloo else words)
    *_, sentence = said(error).splitlines()
    assert re.match(r"error: rank 1 on \S+ lost another process at an unknown line: ", sentence)
    assert sentence.endswith((shown or words).rstrip("."))


@pytest.mark.parametrize(
    "bug",
    [
        RuntimeError("DataLoader timed out after 5 seconds"),
        RuntimeError("connection reset by peer"),  # of a database that a dataset reads
        TimeoutError("timed out"),
        KeyError("connection closed"),
        ConnectionResetError(104, "Connection reset by peer"),  # of a server that a dataset reads
        RuntimeError(GLOO + "op.preamble.length <= op.nbytes. 8 vs 4"),
        distributed.DistBackendError("NCCL error: invalid usage"),
    ],
)
def test_any_other_error_keeps_its_traceback(said, bug):
    assert type(bug).__name__ in said(bug).splitlines()[0]
