"""What all tests share: where this project is, and processes that are left as they were found."""

import os
import signal
import sys
from pathlib import Path

import pytest

# Before torch is loaded, and for all that is launched from here: OpenMP's threads sleep while they wait. By default
# they spin, and with more threads than cores (two tests at a time) a step takes four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch.utils.data

# A DataLoader that dies in a cycle of references has lost the thread that tells its workers to end: it waits this long
# for each of them, by default 5 s.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="session")
def _signals_as_from_a_terminal():
    """nohup has SIGHUP ignored, and a shell the SIGINT of what it runs in the background, and a process inherits that.
    Any handler is not inherited, and keeps these tests alive as well."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _as_before():
    """Restore the handlers of signals and of uncaught errors, and remove the state that Accelerate keeps."""
    names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before, excepthook = [signal.getsignal(name) for name in names], sys.excepthook
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)
    sys.excepthook = excepthook
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
