"""What a program that judges scripts may know and change of a run: prove/ asks here, and nowhere else.

`prove` runs a script of this project unchanged, on fewer samples, and compares what its processes do. All that it needs
beside the public parts of Batch, GlobalLoader, Run and Checkpoints is a function below. VERSION counts the changes of
this page that it must know of; its own side is prove/prove_training/recording/global_loader.py, which judges a script
of another version as any other. tests/seam/ tests both sides. No module of utils/ imports this one.
"""

from collections.abc import Callable
from typing import Any

from . import run as runs
from .checkpoint import Checkpoints
from .loader import Batch, GlobalLoader
from .run import Run

VERSION = 1
__all__ = ["VERSION", "Batch", "Checkpoints", "GlobalLoader", "Run"]


def let_processes_differ() -> None:
    """From now on, what differs between processes or micro-batches, or is not saved, ends no run: prove reports it."""
    runs.same_state.check, runs.same_state.stop = lambda *_: None, lambda _: None
    runs.same_result = runs.same_state.same_on_all = lambda values: values


def virtual_processes(run: Run) -> int:
    """The number of virtual processes, with which the bits do not depend on the number of processes; 0: none."""
    return run.accelerator.layout.virtual_processes


def wrap_collate(loader: GlobalLoader, wrap: Callable[[Callable], Callable], unwrap: Callable[[Any], Any]) -> None:
    """Have `wrap(collate_fn)` make each batch of a loader's items, also in workers; `batch.data` is then what it makes.

    A loader of tensors in memory has no items, and stays as it is.

    Args:
        wrap: takes the function that makes a batch of a list of items, and returns one.
        unwrap: takes what that one has made, and returns the batch, for `loss_weights`.
    """
    if loader.reader is not None:
        fetcher, weigh = loader.reader.fetcher, loader.loss_weights
        fetcher.collate_fn = wrap(fetcher.collate_fn)
        loader.loss_weights = weigh and (lambda data: weigh(unwrap(data)))
