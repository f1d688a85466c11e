"""An accelerator of one rank, without a process group: for what only asks it who and where it is."""

from types import SimpleNamespace

import torch
from accelerate.utils import DistributedType


def fake_accelerator(processes=1, rank=0, device="cpu", kind="NO", precision="no", **more):
    """Its collectives return what this rank has: the others have zeros. more: other attributes, by their names."""
    attributes = {
        "num_processes": processes,
        "shards": processes if kind == "FSDP" else 1,
        "process_index": rank,
        "is_main_process": rank == 0,
        "device": torch.device(device),
        "distributed_type": DistributedType(kind),
        "is_fsdp2": kind == "FSDP",
        "mixed_precision": precision,
        "gradient_accumulation_steps": 1,
        "virtual_processes": 0,
        "split_batch": True,
        "loaders": {},
        "init_handler": None,
        "project_dir": "run",
        "print": print,
        "reduce": lambda tensor, kind: tensor / {"sum": 1, "mean": processes}[kind],
        "gather": lambda tensor: tensor,
        "wait_for_everyone": lambda: None,
        "end_training": lambda: None,
    }
    return SimpleNamespace(**attributes | more)
