"""Calls of torch.save, torch.load and Accelerator.save_state, and what the files contain."""

import contextlib
import importlib
import os

import torch

from ..records import Save
from .where import before, wrap

LOADS = (("torch.distributed.checkpoint", "load"), ("safetensors.torch", "load_file"))


def install(recording) -> None:
    processes = recording.processes

    def add(path: str, **facts) -> None:
        recording.saves.append(Save(after=len(recording.steps), path=path, line=recording.where.line(), **facts))
        saved(recording)

    @wrap(torch, "save")
    def save(original, obj, f, *args, **kwargs):
        with processes.calling():
            original(obj, f, *args, **kwargs)
        if not processes.depth:
            add(str(f) if isinstance(f, (str, os.PathLike)) else "?", kind="torch.save", **described(obj))

    def loaded(*_, **__) -> None:
        recording.facts.has_loaded = True

    for module, name in LOADS if recording.plan.is_resumed else ():
        with contextlib.suppress(ImportError):
            before(importlib.import_module(module), name, loaded)

    @wrap(torch, "load")
    def load(original, f, *args, **kwargs):
        loaded()
        if recording.plan.without_gpu:
            args, kwargs = (), kwargs | {"map_location": "cpu"}
        return original(f, *args, **kwargs)

    with contextlib.suppress(ImportError):
        import accelerate

        @wrap(accelerate.Accelerator, "save_state")
        def save_state(original, accelerator, output_dir=None, *args, **kwargs):
            with processes.calling():
                result = original(accelerator, output_dir, *args, **kwargs)
            prepared = {id(scheduler.scheduler) for scheduler in accelerator._schedulers}
            are_saved = accelerator._custom_objects or {*map(id, recording.models.schedules)} <= prepared
            add(str(output_dir), kind="save_state", lacks_schedule=not are_saved)
            return result


def saved(recording) -> None:
    """A checkpoint, or a part of it, is written: a run that will be resumed ends when it trains on."""
    if recording.plan.stop_after_save and recording.steps:
        recording.facts.has_saved = True


def described(content) -> dict:
    """What a file that torch.save writes contains, judged by its structure."""
    parts, has, prefix, counters, is_rounded = [("", content)], set(), "", [], False
    for name, part in content.items() if isinstance(content, dict) else ():
        parts += [("", each) for each in part] if isinstance(part, list) else [(str(name), part)]
    for name, part in parts:
        if isinstance(part, dict) and {"state", "param_groups"} <= part.keys():
            has.add("optimizer")
        elif isinstance(part, dict) and "last_epoch" in part:
            has.add("schedule")
        elif isinstance(part, dict) and part and all(isinstance(entry, torch.Tensor) for entry in part.values()):
            has.add("model")
            is_rounded |= any(entry.dtype in (torch.float16, torch.bfloat16) for entry in part.values())
            for start in ("module.", "_orig_mod."):
                if all(str(key).startswith(start) for key in part):
                    prefix = start
        elif name and isinstance(part, (int, float)) and not isinstance(part, bool):
            counters.append(name)
    return {"has": has, "prefix": prefix, "counters": counters, "is_rounded": is_rounded}
