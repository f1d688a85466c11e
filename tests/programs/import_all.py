"""Imports each module of utils, and prints what an import has changed in the process."""

import gc
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

# What the libraries do when they are imported is theirs.
import accelerate.commands.launch
import accelerate.optimizer
import datasets  # noqa: F401
import evaluate  # noqa: F401
import psutil  # noqa: F401
import torch
import torchvision  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def state_of_the_process() -> dict:
    return {
        "gc": (gc.isenabled(), gc.get_freeze_count()),
        "hook": sys.excepthook,
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "python threads": threading.active_count(),
        "handlers": [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "accelerate": (accelerate.optimizer.inspect, accelerate.optimizer.is_lomo_available),
    }


before = state_of_the_process()
for path in sorted((ROOT / "utils").rglob("*.py")):
    if path.stem == "__main__":
        continue
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    after = state_of_the_process()
    for name, value in before.items():
        if after[name] != value:
            print(path, name, value, after[name])
print("imported all")
