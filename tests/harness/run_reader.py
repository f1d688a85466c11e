"""What a run has left in its folder."""

import hashlib
import json
from pathlib import Path

import safetensors.torch
import torch

from utils.checkpoint.reading import read_checkpoint

TIMINGS = {"samples_per_s", "data_wait_pct"}  # of a line, and not the same twice


def lines(run: Path, split: str | None = None, timings: bool = False) -> list[dict]:
    """metrics.jsonl: all lines, or those of `train` or `test`; the timings only if asked for."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    without = () if timings else TIMINGS
    found = [{name: value for name, value in line.items() if name not in without} for line in found]
    return [line for line in found if split in (None, line["split"])]


def losses(run: Path, split: str | None = "train") -> list[float]:
    return [line["loss"] for line in lines(run, split)]


def record(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def launches(run: Path) -> list[dict]:
    return record(run)["launches"]


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def weights(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / f"{name}.safetensors")


def final_models(run: Path) -> dict[str, str]:
    """The SHA-256 of the final models by name; there is at least one."""
    models = {file.stem: sha256(file) for file in run.glob("*.safetensors")}
    assert models, run
    return models


def checkpoint(path: Path) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    """The manifest of a checkpoint, and its tensors by file and name, whole."""
    manifest, files = read_checkpoint(path)
    return manifest, {file: {n: stored.whole() for n, stored in tensors.items()} for file, tensors in files.items()}


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when the run was killed."""
    try:
        return any((run / "checkpoints").glob(".part_*/*"))
    except FileNotFoundError:  # renamed while we looked
        return False


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
