"""When a run is resumed: find the newest whole checkpoint, check that it fits, and load it."""

import errno
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import safetensors.torch
from accelerate.utils import gather_object

from ..agree import on_main
from ..console import show, stop
from .folder import FORMAT, NEED_ONE_FOLDER, RANK, checksum, newest_first
from .state import SavedTensor, type_and_shape


def load_newest(checkpoints) -> tuple[int, dict]:
    """Load the newest intact one of the Checkpoints; returns its step and its run_state. Collective.

    Rank 0 finds it. All processes read exactly that one, or stop.
    """
    accelerator, folder = checkpoints.accelerator, checkpoints.folder
    name, manifest = on_main(accelerator, lambda: find_newest(folder))
    path, rank = folder / name, accelerator.process_index
    share = slice(rank, None, accelerator.num_processes) if rank else slice(0)  # rank 0 has checked all files
    try:
        own, files = read_checkpoint(path, share)
        problem = None if own == manifest else "it has a different one"
    except (OSError, ValueError) as error:
        problem = str(error)
    for rank, reason in enumerate(gather_object([problem])):
        if reason:
            stop(f"{path} is intact, but rank {rank} cannot read it ({reason}): {NEED_ONE_FOLDER}")
    saved = manifest["must_match"]
    for name in saved["models"]:  # with the layers that it got since its first step
        saved["models"][name] = {n: type_and_shape(t) for n, t in files[f"{name}.safetensors"].items()}
    check_fits(checkpoints, saved, manifest["step"])
    for name, entry in checkpoints.entries.items():
        entry.load(files.pop(f"{name}.safetensors", {}), manifest["state"].get(name))
    return manifest["step"], manifest["extra"]


def check_fits(checkpoints, saved: dict, step: int) -> None:
    """Stop at the first kind of difference: the others follow from it."""
    before, total_steps, now = saved["total_steps"], checkpoints.must_match["total_steps"], {**checkpoints.must_match}
    if total_steps >= step:
        now["total_steps"] = before
    for kind in now | saved:
        path = "" if kind in ("flags", "models", "state") else kind
        reasons = differences(saved.get(kind), now.get(kind), path)
        if reasons:
            reasons.sort(key=lambda reason: ".class was " not in reason)  # others follow from the class
            shown = "; ".join(reasons[:5]) + f"; and {len(reasons) - 5} more" * (len(reasons) > 5)
            stop(f"the run in {checkpoints.folder.parent} cannot be resumed with different arguments: {shown}")
    if total_steps != before and checkpoints.accelerator.is_main_process:
        # Its curve is not that of a run which was as long from its start: a cosine has begun to end.
        show(
            f"warning: the run had {before} steps and now has {total_steps}: a function of the step and of their "
            "number, as in LambdaLR, goes on with another learning rate"
        )


def read_checkpoint(path: Path, share: slice = slice(None)) -> tuple[dict, dict[str, dict[str, SavedTensor]]]:
    """The manifest of a checkpoint and its tensors, by file and name; the parts of sharded tensors are joined.

    The tensors are memory-mapped: copy what must outlive the files.

    Args:
        share: the files, in the order of their names, whose SHA-256 is checked.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
        OSError: a file cannot be read for another reason, such as missing permissions, and may be intact.
    """
    name, parts = "manifest.json", {}
    try:
        manifest = json.loads((path / name).read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("checksum", None) != checksum(manifest):
            raise ValueError("its checksum differs")
        if manifest["format"] != FORMAT:
            stop(
                f"{path} cannot be read: it was written by another version of the code (format {manifest['format']}, "
                f"and this version reads {FORMAT}); nothing is changed: resume with that version, or start a new run"
            )
        digests = sorted(manifest["sha256"].items(), key=lambda pair: (len(pair[0]), pair))  # rank 2 before rank 10
        for name, digest in digests[share]:
            if hashlib.sha256(np.memmap(path / name, mode="r")).hexdigest() != digest:
                raise ValueError("its SHA-256 is not the one in manifest.json")
        for name, _ in digests:
            found = parts.setdefault(re.sub(RANK, "", name), {})
            for key, tensor in safetensors.torch.load_file(path / name).items():
                found.setdefault(key, []).append(tensor)
    except Exception as error:  # of any type: the JSON may contain anything
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise
        raise ValueError(f"{name}: {error}") from error
    return manifest, {file: {key: SavedTensor(rows) for key, rows in found.items()} for file, found in parts.items()}


def find_newest(folder: Path) -> tuple[str, dict]:
    """The name and manifest of the newest intact checkpoint. On the main process.

    Damaged ones are named, and renamed to damaged_step_*, since the run will write checkpoints of these steps again.
    """
    paths = newest_first(folder)
    for number, path in enumerate(paths):
        try:
            manifest, _ = read_checkpoint(path)
        except ValueError as damage:
            show(f"warning: {path} is skipped: {damage}")
            continue
        for damaged in paths[:number]:
            aside = damaged.with_name(f"damaged_{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
        return path.name, manifest
    stop(f"none of the {len(paths)} checkpoints in {folder} is intact: start a new run with another --output_dir")


def differences(saved, now, path: str = "") -> list[str]:
    """Sentences such as "optimizer.groups.0.lr was 0.1 and is 0.2"."""
    if isinstance(saved, list) and isinstance(now, list):
        saved, now = dict(enumerate(saved)), dict(enumerate(now))
    if not isinstance(saved, dict) or not isinstance(now, dict):
        return [f"{path} was {saved!r} and is {now!r}"] if saved != now else []
    paths = {name: f"{path}.{name}" if path else name for name in sorted(saved.keys() | now.keys())}
    return [reason for name in paths for reason in differences(saved.get(name), now.get(name), paths[name])]
