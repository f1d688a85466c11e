"""Process groups, and the collective calls that the script makes."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from .where import wrap

COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object")
COLLECTIVES += ("all_gather_into_tensor",)
OF_ACCELERATOR = ("gather", "gather_for_metrics", "reduce")
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Processes:
    """What the script has of other processes."""

    def __init__(self, recording):
        self.recording, self.facts = recording, {"starts_processes": "", "local_sgd": ""}
        self.in_library = 0
        # What a process has called stands there also when it dies.
        path = Path(recording.plan["output"], f"calls_{recording.rank}.txt")
        self.calls = open(path, "w", buffering=1)  # noqa: SIM115  until the end

    def collective(self, name: str) -> None:
        recording = self.recording
        if not self.in_library:
            line = recording.where.line()
            where = recording.evaluations.current or recording.step
            where["collectives"].append((name, line))
            self.calls.write(f"{len(recording.steps)} {name} {line}\n")

    @contextlib.contextmanager
    def inside(self):
        """A library's own calls are not the script's."""
        self.in_library += 1
        try:
            yield
        finally:
            self.in_library -= 1

    def result(self) -> tuple[dict, dict]:
        return self.facts, {}

    def install(self) -> None:
        install_torch(self)
        with contextlib.suppress(ImportError):
            install_accelerate(self)


def install_torch(processes: Processes) -> None:
    recording = processes.recording

    @wrap(torch.multiprocessing, "start_processes")
    def start(original, *args, **kwargs):
        processes.facts["starts_processes"] = recording.where.line()
        recording.end()

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes

    @wrap(dist, "init_process_group")
    def init(original, backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        original("gloo", *args, **kwargs)
        processes.facts["group"] = recording.where.line()

    for name in COLLECTIVES:

        @wrap(dist, name)
        def collective(original, *args, name=name, **kwargs):
            processes.collective(name)
            return original(*args, **kwargs)


def install_accelerate(processes: Processes) -> None:
    import accelerate
    from accelerate import local_sgd, state

    recording = processes.recording

    @wrap(state.PartialState, "__init__")
    def init_state(original, self, *args, **kwargs):
        if recording.plan["processes"] > 1:
            return original(self, *args, **kwargs)
        with mock.patch.dict(os.environ):  # as without a launcher
            for name in OF_LAUNCHERS:
                os.environ.pop(name, None)
            return original(self, *args, **kwargs)

    @wrap(accelerate.Accelerator, "__init__")
    def init(original, self, *args, **kwargs):
        if kwargs.get("mixed_precision") not in (None, "no"):
            kwargs["mixed_precision"] = "no"
            recording.off.switched_off.add("mixed precision")
        original(self, *args, **kwargs)
        processes.facts["accelerate"] = recording.where.line()
        recording.batches.same.splits_batches = bool(self.split_batches)

    for name in OF_ACCELERATOR:

        @wrap(accelerate.Accelerator, name)
        def collective(original, *args, name=name, **kwargs):
            processes.collective(name)
            with processes.inside():
                return original(*args, **kwargs)

    @wrap(local_sgd.LocalSGD, "__init__")
    def init_local_sgd(original, self, *args, **kwargs):
        processes.facts["local_sgd"] = recording.where.line()
        original(self, *args, **kwargs)
