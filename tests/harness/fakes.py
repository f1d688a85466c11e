"""An accelerator of one rank, without a process group, for what only asks it who and where it is."""

import dataclasses
from types import SimpleNamespace

import torch
from accelerate.utils import DistributedType

from utils.console import show
from utils.layout import Layout


def fake_accelerator(processes=1, rank=0, device="cpu", kind="NO", precision="no", **more):
    """Its collectives return what this rank has: the others have zeros.

    more: fields of its Layout, and other attributes, by their names.
    """
    shards = more.pop("shards", processes if kind == "FSDP" else 1)
    fields = [field.name for field in dataclasses.fields(Layout) if field.name in more]
    layout = Layout(processes, rank, shards, **{name: more.pop(name) for name in fields})
    attributes = {
        "num_processes": processes,
        "layout": layout,
        "process_index": rank,
        "is_main_process": rank == 0,
        "device": torch.device(device),
        "distributed_type": DistributedType(kind),
        "is_fsdp2": kind == "FSDP",
        "mixed_precision": precision,
        "gradient_accumulation_steps": layout.accumulation,
        "loaders": {},
        "init_handler": None,
        "project_dir": "run",
        "print": show,
        "reduce": lambda tensor, kind: tensor / {"sum": 1, "mean": processes}[kind],
        "wait_for_everyone": lambda: None,
        "end_training": lambda: None,
    }
    return SimpleNamespace(**attributes | more)
