"""What is saved and loaded."""

import contextlib
import os

import torch
from torch import nn

from .where import wrap


class Files:
    """Calls of torch.save and Accelerator.save_state, by what is in the file."""

    def __init__(self, recording):
        self.recording, self.saves = recording, []
        self.has_saved = False

    def add(self, path: str, kind: str, facts: dict) -> None:
        where = {"after": len(self.recording.steps), "path": path, "line": self.recording.where.line(), "kind": kind}
        self.saves.append(where | facts)
        self.saved()

    def saved(self) -> None:
        if self.recording.plan["stop_after_save"] and self.recording.steps:
            self.has_saved = True
            self.recording.end()

    def save_state(self, accelerator, folder) -> None:
        prepared = [scheduler.scheduler for scheduler in accelerator._schedulers]
        lacks = [one for one in self.recording.models.schedules if not any(one is each for each in prepared)]
        lacks_schedule = bool(lacks) and not accelerator._custom_objects
        self.add(str(folder), "save_state", {"lacks_schedule": lacks_schedule, "prefix": "", "has": []})

    def result(self) -> tuple[dict, dict]:
        return {"has_saved": self.has_saved}, {"saves": self.saves}

    def install(self) -> None:
        processes = self.recording.processes

        @wrap(torch, "save")
        def save(original, obj, f, *args, **kwargs):
            with processes.inside():
                original(obj, f, *args, **kwargs)
            if not processes.in_library:
                self.add(str(f) if isinstance(f, (str, os.PathLike)) else "?", "torch.save", described(obj))

        @wrap(torch, "load")
        def load(original, f, *args, **kwargs):
            if self.recording.plan["without_gpu"]:
                args, kwargs = (), kwargs | {"map_location": "cpu"}
            return original(f, *args, **kwargs)

        with contextlib.suppress(ImportError):
            import accelerate

            @wrap(accelerate.Accelerator, "save_state")
            def save_state(original, accelerator, output_dir=None, *args, **kwargs):
                with processes.inside():
                    result = original(accelerator, output_dir, *args, **kwargs)
                self.save_state(accelerator, output_dir)
                return result


def described(content) -> dict:
    """What a file that torch.save writes has in it, by what it looks like."""
    parts = {"": content} | ({str(name): part for name, part in content.items()} if isinstance(content, dict) else {})
    has, prefix, counters = set(), "", []
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            has.add("module")
        elif isinstance(part, dict) and {"state", "param_groups"} <= part.keys():
            has.add("optimizer")
        elif isinstance(part, dict) and "last_epoch" in part:
            has.add("schedule")
        elif isinstance(part, dict) and part and all(isinstance(entry, torch.Tensor) for entry in part.values()):
            has.add("model")
            for start in ("module.", "_orig_mod."):
                if all(str(key).startswith(start) for key in part):
                    prefix = start
        elif name and isinstance(part, (int, float)) and not isinstance(part, bool):
            counters.append(name)
    return {"has": sorted(has), "prefix": prefix, "counters": counters}
