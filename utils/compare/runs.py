"""Reads the folder of a run. Whatever is odd in it is an error that names the file, with exit code 2."""

import json
from pathlib import Path

from ..best import is_number
from ..console import stop

# In the lines of metrics.jsonl, and different in every run.
TIMINGS = ("samples_per_s", "data_wait_pct")
# What the comparison reads of run.json, where it is there and not null.
ENTRIES = {"arguments": dict, "data": dict, "versions": dict, "launches": list, "command": list}
ENTRIES |= {"git_commit": str, "total_steps": int}


def read_text(path: Path) -> str:
    """Raises: SystemExit if the file cannot be read, or is a pipe or a device, which may have no end."""
    if not path.is_file():
        stop(f"{path} cannot be read: it is not a regular file")
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror or error}")


def read_json(path: Path) -> dict:
    """A file that holds one JSON object. Raises: SystemExit if it cannot be read or is damaged."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        stop(f"{path} is damaged: it is not a JSON object")
    return content


def read_record(folder: Path) -> dict:
    """run.json. Raises: SystemExit if the folder does not hold a run, or the file is of another form."""
    path = Path(folder) / "run.json"
    if not Path(folder).is_dir():
        stop(f"{folder} is not a run: there is no such folder")
    if not path.exists():
        stop(f"{folder} is not a run: it has no run.json")
    record = read_json(path)
    for name, kind in ENTRIES.items():
        if record.get(name) is None:
            record[name] = {dict: {}, list: []}.get(kind)
        elif not isinstance(record[name], kind):
            stop(f"{path} is damaged: its {name} is not of the type {kind.__name__}")
    if not all(map(is_launch, record["launches"])):
        stop(f"{path} is damaged: its launches are not objects with a from_step and a list of processes")
    return record


def is_launch(launch) -> bool:
    if not isinstance(launch, dict) or not is_number(launch.get("from_step", 0)):
        return False
    processes = launch.get("processes") or []
    return isinstance(processes, list) and all(isinstance(process, dict) for process in processes)


def read_metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, with numbers only and without timings; [] if there is no file.

    Each line has a split and a step. A last line that is half written is left out.

    Raises:
        SystemExit: with its number, if another line is damaged.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    texts = read_text(path).splitlines(keepends=True)
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            numbers = {name: float(value) for name, value in line.items() if is_number(value)}
            for name in (*TIMINGS, "epoch"):
                numbers.pop(name, None)
            lines.append({**numbers, "split": str(line["split"]), "step": int(line["step"])})
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            if number == len(texts) and not text.endswith("\n"):
                break
            stop(f"{path} is damaged: line {number} is not a JSON object with a split and a step")
    return lines


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, newest first."""
    steps = []
    for path in (Path(folder) / "checkpoints").glob("step_*"):
        digits = path.name.removeprefix("step_")
        if digits.isdecimal() and (path / "manifest.json").is_file():
            steps.append(int(digits))
    return sorted(steps, reverse=True)


def progress(folder: Path) -> dict:
    """How far a run is: {"step", "total_steps", "finished", "stopped_early", "checkpoint"}.

    step: of the last line of metrics, 0 without one. checkpoint: the newest one's step, or None.
    """
    path = Path(folder) / "summary.json"
    summary = read_json(path) if path.exists() else {}
    step = summary.get("step", max((line["step"] for line in read_metrics(folder)), default=0))
    if not is_number(step):
        stop(f"{path} is damaged: its step is not a number")
    return {
        "step": step,
        "total_steps": read_record(folder)["total_steps"],
        "finished": bool(summary),
        "stopped_early": bool(summary.get("stopped_early")),
        "checkpoint": max(checkpoint_steps(folder), default=None),
    }


def curves(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The metrics of a run as {metric: {split: [(step, value), ...]}}, as they are drawn."""
    found = {}
    for line in read_metrics(folder):
        for name, value in line.items():
            if name not in ("split", "step") and abs(value) < float("inf"):
                found.setdefault(name, {}).setdefault(line["split"], []).append((line["step"], value))
    return found


def train_samples(record: dict, since: int, step: int) -> list[int]:
    """How many samples the train line of `step` may be the mean of, if the line before is of step `since`: with a
    smaller last step of each epoch, and without."""
    batch, items = record["arguments"].get("batch_size"), record["data"].get("train")
    if not all(isinstance(number, int) and number > 0 for number in (batch, items)):
        return []
    per_epoch = -(-items // batch)
    first, last = (number // per_epoch * items + number % per_epoch * batch for number in (since, step))
    return [last - first, (step - since) * batch]
