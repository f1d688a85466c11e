"""Compare runs: where their numbers begin to differ, by how much, and which settings differ.

    python tools/compare runs/a runs/b

The first folder is the reference. The exit code is 0 if the other runs are the same, bit for bit or up to rounding, 1
if one of them differs or lacks something, and 2 if a folder does not hold a run or there is nothing to compare.
Unfinished runs are compared up to their last step.
"""

import argparse
import itertools
import json
import math
import operator
import traceback
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from utils.console import show, stop
from utils.flags import non_negative_float

# Logged numbers with a smaller relative difference are the same up to rounding. Measured with mnist_mlp.py in float32,
# 6 seeds, 1 to 3 processes, 1 and 4 micro-batches: at most 2.1e-6.
TOLERANCE = 1e-5
# The tolerance for tensors, relative to their largest entry, is this times larger. The same runs: at most 2.3e-4.
TENSORS = 100
WORST = 10  # rows in a table
NOT_COMPARED = ("samples_per_s", "data_wait_pct", "epoch")  # in metrics.jsonl: timings, and what the step determines
# Settings that affect no logged number and no tensor.
WITHOUT_EFFECT = {"output_dir", "resume", "checkpoint_every", "save_best", "keep_checkpoints", "log_every", "log_with"}
WITHOUT_EFFECT |= {"num_workers", "cache_dir", "patience", "timeout_s", "from_step"}
# Settings that affect no bit of a run with virtual processes.
NOT_WITH_VIRTUAL = {"distributed_type", "backend", "num_processes", "data_parallel_gpus", "machines"}
NOT_WITH_VIRTUAL |= {"gradient_accumulation_steps"}
# Implementation switches in an optimizer's state, not hyperparameters.
IMPLEMENTATION = ("fused", "foreach", "capturable")


@dataclass
class Run:
    name: str
    folder: Path
    settings: dict[str, object]  # see read_settings
    numbers: pd.DataFrame  # see read_numbers
    step: int  # the last one
    finished: bool


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs in these folders, named by the folders, or by their whole paths where two names are equal."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    try:
        return list(map(read_run, folders, names))
    except OSError as error:
        stop(f"{error.filename} cannot be read: {error.strerror}")


def read_run(folder: Path, name: str) -> Run:
    if not (folder / "run.json").is_file():
        stop(f"{folder} is not a run: it has no run.json")
    settings = read_settings(read_json(folder / "run.json"))
    numbers = read_numbers(folder / "metrics.jsonl", settings.get("batch_size") or math.nan)
    finished = (folder / "summary.json").is_file()
    step = read_json(folder / "summary.json")["step"] if finished else max(numbers["step"], default=0)
    return Run(name, folder, settings, numbers, step, finished)


def is_number(value) -> bool:
    """Whether a value of a JSON file is a number; type() because True is an int."""
    return type(value) in (int, float)


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        stop(f"{path} is damaged: it is not a JSON object")
    return content


def read_settings(record: dict) -> dict[str, object]:
    """The settings in run.json by name. If resuming changed the topology, a value reads "1, then 2"."""
    settings = {"script": Path((record.get("command") or [""])[0]).name}
    for section in ("arguments", "data", "versions"):
        settings |= record.get(section) or {}
    settings |= {name: record.get(name) for name in ("total_steps", "git_commit")}
    launches = []
    for launch in record.get("launches") or []:
        # This launch repeats the steps of all earlier ones that began at the same step or later.
        launches = [earlier for earlier in launches if earlier["from_step"] < launch["from_step"]]
        processes = launch.pop("processes", None) or []
        devices = [str(process.get("device_name") or process.get("device")) for process in processes]
        launch["devices"] = ", ".join(dict.fromkeys(devices))
        launch["cpu_threads"] = ", ".join(dict.fromkeys(str(process.get("cpu_threads")) for process in processes))
        launch["machines"] = len({process.get("host") for process in processes})
        launches.append(launch)
    for name in dict.fromkeys(itertools.chain(*launches)):
        if name not in ("started", "config_file", *settings):
            values = itertools.groupby(launch.get(name) for launch in launches)
            settings[name] = ", then ".join(str(value) for value, _ in values)
    return settings


def read_numbers(path: Path, batch_size: float) -> pd.DataFrame:
    """The numbers in metrics.jsonl, one per row, without an incomplete last line.

    Not with pandas.read_json, which turns missing metrics into NaN, rounds a third of all floats, and reads nothing if
    the last line is incomplete.

    Returns:
        A table with the columns "split", "step", "since" (the step of the previous train line: train lines are means
        over the steps since then), "metric", "nth" (counts the numbers of the same metric, split and step), "value"
        and "samples" (how many the value is a mean of; NaN if unknown).
    """
    rows, last_steps = [], {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            split, step = line.pop("split"), operator.index(line.pop("step"))
        except (ValueError, TypeError, KeyError, AttributeError):
            if number == len(lines) and not text.endswith(b"\n"):
                break
            stop(f"{path} is damaged: line {number} is not a JSON object with a split and a step")
        since = last_steps.get(split, 0) if split == "train" else 0
        samples = line.get("samples") or (split == "train" and (step - since) * batch_size) or math.nan
        for metric, value in line.items():
            if is_number(value) and metric not in NOT_COMPARED:
                rows.append((split, step, since, metric, value, samples))
        last_steps[split] = step
    types = {"split": str, "step": int, "since": int, "metric": str, "value": float, "samples": float}
    table = pd.DataFrame(rows, columns=list(types)).astype(types)
    table["nth"] = table.groupby(["split", "step", "metric"]).cumcount()
    return table


def compare_settings(reference: Run, other: Run) -> pd.DataFrame:
    """The settings that differ and can explain a difference, with the columns "setting", "reference" and "other"."""
    settings = [reference.settings, other.settings]
    ignored = set(WITHOUT_EFFECT)
    if settings[0].get("fingerprint", 0) == settings[1].get("fingerprint", 1):
        ignored.add("dataset")  # the same data in different folders
    if all(values.get("virtual_processes") for values in settings):
        ignored |= NOT_WITH_VIRTUAL
    rows = [(name, *(values.get(name) for values in settings)) for name in {**settings[0], **settings[1]}]
    rows = [row for row in rows if row[1] != row[2] and row[0] not in ignored]
    return pd.DataFrame(rows, columns=["setting", "reference", "other"], dtype=object)


def compare_numbers(reference: Run, other: Run, tolerance: float = TOLERANCE) -> pd.DataFrame:
    """The logged numbers of both runs, up to the last step that both reached, ordered by step.

    Returns:
        A table with the columns "split", "metric", "place" (such as "test loss at step 4"), "difference" (see
        `number_difference`; infinite if one run lacks the number), "exact" (the difference is 0), "beyond" (it is more
        than rounding) and "note" (both values).
    """
    last_step = min(reference.step, other.step)
    numbers = [run.numbers[run.numbers["step"] <= last_step] for run in (reference, other)]
    keys = ["split", "step", "since", "nth", "metric"]
    table = numbers[0].merge(numbers[1], on=keys, how="outer", suffixes=("_reference", "_other"), indicator="runs")
    # A run that was killed may lack its last lines.
    killed = [runs for runs, run in (("left_only", other), ("right_only", reference)) if not run.finished]
    left_out = table["runs"].isin(killed) & (table["step"] == last_step)
    if reference.settings.get("log_every") != other.settings.get("log_every"):
        left_out |= (table["split"] == "train") & (table["runs"] != "both")  # means over different steps
    rows = []
    for row in table[~left_out].sort_values("step", kind="stable").itertuples():
        first, second = row.value_reference, row.value_other
        difference, note = number_difference(first, second), f"{first} and {second}"
        # Rounding may flip a single prediction.
        is_flip = row.metric.endswith("accuracy") and abs(first - second) * row.samples_reference < 1.5
        if row.runs != "both":
            difference, note = math.inf, f"only in {reference.name if row.runs == 'left_only' else other.name}"
        beyond = difference > tolerance and not (is_flip and tolerance)
        place = f"{row.split} {row.metric} at step {row.step}"
        rows.append((row.split, row.metric, place, difference, difference == 0, beyond, note))
    columns = ["split", "metric", "place", "difference", "exact", "beyond", "note"]
    return pd.DataFrame(rows, columns=columns).astype({"exact": bool, "beyond": bool})


def number_difference(first: float, second: float) -> float:
    """|a - b| / max(|a|, |b|): from 0 to 2, infinite if only one is NaN or infinite, 0 if both are NaN."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not math.isfinite(first) or not math.isfinite(second):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def compare_tensors(reference: Run, other: Run, tolerance: float = TOLERANCE) -> pd.DataFrame:
    """Compare the newest common checkpoint and, if both runs ended at the same step, the final models.

    Returns:
        A table, the largest difference first, with the columns "source", "place", "difference" (see
        `tensor_difference`; infinite if a tensor is missing), "beyond" (it is more than rounding), "exact" (all bits
        are equal) and "note". Differing numbers and strings in a checkpoint, such as a learning rate, are rows too.
    """
    rows = []
    folders = [run.folder for run in (reference, other)]
    checkpoints = [{path.parent.name for path in folder.glob("checkpoints/step_*/manifest.json")} for folder in folders]
    if common := checkpoints[0] & checkpoints[1]:
        source = f"the checkpoint of step {int(max(common).removeprefix('step_'))}"
        saved = [load_checkpoint(folder / "checkpoints" / max(common)) for folder in folders]
        (first_state, first), (second_state, second) = saved
        for name in {**first, **second}:
            # Joined one by one: not all tensors of a sharded run need to fit into memory.
            pair = (tensors[name].whole() if name in tensors else None for tensors in (first, second))
            rows.append((source, name, *compare_pair(*pair)))
        rows += [(source, *row) for row in compare_states(first_state, second_state)]
    if reference.finished and other.finished and reference.step == other.step:
        first, second = map(load_models, folders)
        for name in {**first, **second}:
            rows.append(("the final model", name, *compare_pair(first.get(name), second.get(name))))
    table = pd.DataFrame(rows, columns=["source", "place", "difference", "exact", "note"])
    table["beyond"] = table["difference"] > TENSORS * tolerance
    return table.sort_values("difference", ascending=False, kind="stable", ignore_index=True)


def load_checkpoint(path: Path) -> tuple[dict, dict]:
    """The state in a checkpoint's manifest, and its tensors by file and name, which have a method `whole`."""
    from utils.checkpoint.reading import read_checkpoint

    try:
        manifest, files = read_checkpoint(path)
    except (OSError, ValueError) as error:
        stop(f"{path} cannot be read: {error}")
    tensors = {f"{Path(file).stem} {name}": tensor for file, saved in files.items() for name, tensor in saved.items()}
    return manifest["state"], tensors


def load_models(folder: Path) -> dict:
    """The tensors of the final models in a run's folder; not those of the best model (from --save_best)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem.endswith("_best"):
            continue
        try:
            tensors |= {f"{path.stem} {name}": tensor for name, tensor in load_file(path).items()}
        except (OSError, SafetensorError) as error:
            stop(f"{path} cannot be read: {error}")
    return tensors


def compare_states(reference: dict, other: dict) -> list[tuple]:
    """The values that differ in the states of two manifests: rows of "place", "difference", "exact" and "note"."""
    rows = []
    states = [flatten(state, "state") for state in (reference, other)]
    for name in {**states[0], **states[1]}:
        first, second = (state.get(name) for state in states)
        if first != second:
            difference = number_difference(first, second) if is_number(first) and is_number(second) else math.inf
            rows.append((name, difference, False, f"{first} and {second}"))
    return rows


def flatten(value, name: str) -> dict[str, object]:
    """Nested dicts and lists as {"a.b.0": value}."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    flat = {}
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        if key not in IMPLEMENTATION:
            flat |= flatten(entry, f"{name}.{key}")
    return flat


def compare_pair(reference, other) -> tuple[float, bool, str]:
    """The difference of two tensors, whether all bits are equal, and a note. None stands for a missing tensor."""
    import torch

    forms = ["missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (reference, other)]
    if forms[0] != forms[1]:
        return math.inf, False, f"{forms[0]} and {forms[1]}"
    is_exact = torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (reference, other)))
    return 0.0 if is_exact else tensor_difference(reference, other), is_exact, ""


def tensor_difference(reference, other) -> float:
    """The largest absolute difference, divided by the largest finite absolute entry of `reference`.

    Infinite if `reference` is 0 everywhere, or if an entry is NaN or infinite in only one of them.
    """
    import torch

    wide = torch.promote_types(reference.dtype, torch.float64)
    reference, other = reference.to(wide), other.to(wide)
    is_same = (reference == other) | (reference.isnan() & other.isnan())
    largest = torch.where(is_same, 0.0, reference - other).abs().nan_to_num(math.inf).max().item()
    scale = torch.where(reference.isfinite(), reference, 0.0).abs().max().item()
    if largest == 0:  # 0 and -0
        return 0.0
    return largest / scale if scale else math.inf


def judge(numbers: pd.DataFrame, tensors: pd.DataFrame) -> tuple[int, str]:
    """The exit code and the verdict."""
    if numbers.empty and tensors.empty:
        return 2, "nothing to compare: no logged number and no checkpoint step is in both runs"
    for table in (numbers, tensors):
        if table["beyond"].any():
            first = table[table["beyond"]].iloc[0]
            source = f" of {first['source']}" if "source" in first else ""
            note = f" ({first['note']})" if first["note"] else ""
            return 1, f"different, first in {first['place']}{source}{note}"
    verdict = "the same bit for bit" if numbers["exact"].all() and tensors["exact"].all() else "the same up to rounding"
    if numbers.empty or tensors.empty:
        verdict += f" (only {'tensors' if numbers.empty else 'logged numbers'} could be compared)"
    return 0, verdict


def describe(table: pd.DataFrame, what: str, unit: str) -> str:
    if table.empty:
        return f"No {what} to compare."
    if table["exact"].all():
        return f"{len(table)} {what}: all are equal."
    worst = table.loc[table["difference"].idxmax()]
    equal, largest = table["exact"].sum(), f"{worst['difference']:.1e} {unit}, in {worst['place']}"
    return f"{len(table)} {what}: {equal} are equal, and the largest difference is {largest}."


def report(reference: Run, other: Run, tolerance: float) -> tuple[int, str]:
    """Print the differences; return the exit code and the verdict."""
    settings = compare_settings(reference, other)
    numbers = compare_numbers(reference, other, tolerance)
    tensors = compare_tensors(reference, other, tolerance)
    code, verdict = judge(numbers, tensors)

    tables = [settings.rename(columns={"reference": reference.name, "other": other.name})]
    if code:
        worst = numbers.sort_values("difference").drop_duplicates(["split", "metric"], keep="last")
        tables += [table[~table["exact"]].head(WORST) for table in (worst, tensors)]
    for table in tables:
        if len(table):
            columns = [column for column in table if column not in ("split", "metric", "exact", "beyond")]
            formats = {"difference": "{:.1e}".format}
            show(table.to_string(columns=columns, index=False, max_colwidth=60, formatters=formats) + "\n")
    last_step = min(reference.step, other.step)
    show(describe(numbers, f"logged numbers up to step {last_step}", "of the number"))
    sources = " and ".join(tensors["source"].unique()) or "a checkpoint or model"
    show(describe(tensors, f"tensors of {sources}", "of the tensor's largest entry"))
    if code == 0 and reference.step != other.step:
        verdict += f" up to step {last_step}"
    if code == 1:
        verdict += f"; settings that differ: {', '.join(settings['setting']) or 'none'}"
    return code, f"{other.name} compared with {reference.name}: {verdict}"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser("compare", description="Compare runs: where do their numbers begin to differ?")
    add = parser.add_argument
    add("reference", type=Path, metavar="RUN", help="folder of the run to compare with")
    add("others", type=Path, nargs="+", metavar="OTHER", help="folders of other runs")
    tolerance = f"largest relative difference due to rounding; for tensors {TENSORS} times as large (%(default)g)"
    add("--tolerance", type=non_negative_float, default=TOLERANCE, metavar="X", help=tolerance)
    args = parser.parse_args()
    try:
        return compare_all([args.reference, *args.others], args)
    except Exception:  # Python's own exit code, 1, would mean "different"
        traceback.print_exc()
        return 2


def compare_all(folders: list[Path], args) -> int:
    runs = read_runs(folders)
    results = []
    for other in runs[1:]:
        results.append(report(runs[0], other, args.tolerance))
        show("")
    for _, verdict in results:
        show(verdict)
    return max(code for code, _ in results)
