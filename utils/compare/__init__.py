"""Compare runs: where their numbers begin to differ, by how much, and what else differs.

    python -m utils.compare runs/a runs/b

The first folder is the reference, and each other one is compared with it. The exit code is 0 if the
numbers are the same within the tolerance, 1 if they are not, and 2 if a folder holds no run or
there is nothing to compare. A run that goes on or was killed is compared as far as it got.

For other programs: `compare_facts`, `compare_metrics`, `compare_tensors` and `judge` return dicts,
and `compare` calls all four. The values in them are JSON, but a difference can be infinite.
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

from ..console import plural, show, stop
from ..features.curves import TIMINGS, plot_comparison
from ..flags import at_least

TOLERANCE = 1e-6
WORST = 10  # tensors in the table
CHUNK = 2**22  # entries of a tensor that are compared at a time, in float64
# Not in the table of arguments: where a run writes, and whether it was resumed.
NOT_COMPARED = ("output_dir", "resume")
# In that table, but no metric or tensor depends on them.
WITHOUT_EFFECT = (
    "checkpoint_every",
    "save_best",
    "keep_checkpoints",
    "log_every",
    "log_with",
    "num_workers",
    "patience",
    "predict",
    "profile",
    "timeout_s",
)
# What a launch has in run.json and what is no topology, or is described by `devices`.
NO_TOPOLOGY = ("started", "from_step", "config_file", "processes")
LAUNCHES = "launched at step"
# How an optimizer computes its step, and not what it is.
IMPLEMENTATION = ("fused", "foreach", "capturable")


def compare(reference: Path, other: Path, tolerance: float = TOLERANCE) -> dict:
    """Compare two run folders: {"facts", "metrics", "tensors", "verdict"}, one for each function.

    Raises: SystemExit, in one sentence, if a folder holds no run or a file in it cannot be read.
    """
    facts = compare_facts(reference, other)
    metrics = compare_metrics(reference, other, tolerance)
    tensors = compare_tensors(reference, other)
    verdict = judge(facts, metrics, tensors, tolerance)
    return {"facts": facts, "metrics": metrics, "tensors": tensors, "verdict": verdict}


# Reading a run


def read_json(path: Path) -> dict:
    """A file that holds one JSON object. Raises: SystemExit if it cannot be read or is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror or error}")
    except ValueError:  # also if it is no text
        content = None
    if not isinstance(content, dict):
        stop(f"{path} is damaged: it is no JSON object")
    return content


def read_record(folder: Path) -> dict:
    """run.json. Raises: SystemExit if the folder holds no run."""
    path = Path(folder) / "run.json"
    if not Path(folder).is_dir():
        stop(f"{folder} is no run: there is no such folder")
    if not path.is_file():
        stop(f"{folder} is no run: it has no run.json")
    return read_json(path)


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl, with numbers only and without timings; [] if there is no file.

    Each line has a split and a step. A last line that is half written is left out.
    Raises: SystemExit, with its number, if another line is damaged.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        texts = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError as error:
        stop(f"{path} cannot be read: {error.strerror or error}")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            numbers = {name: value for name, value in line.items() if is_number(value)}
            for name in (*TIMINGS, "epoch"):
                numbers.pop(name, None)
            lines.append({**numbers, "split": str(line["split"]), "step": int(line["step"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            if number == len(texts) and not text.endswith("\n"):
                break
            stop(f"{path} is damaged: line {number} is no JSON object with a split and a step")
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
    folder = Path(folder)
    path = folder / "summary.json"
    summary = read_json(path) if path.exists() else {}
    last = max((line["step"] for line in read_metrics(folder)), default=0)
    return {
        "step": summary.get("step", last),
        "total_steps": read_record(folder).get("total_steps"),
        "finished": bool(summary),
        "stopped_early": bool(summary.get("stopped_early")),
        "checkpoint": max(checkpoint_steps(folder), default=None),
    }


# What differs besides the numbers


def compare_facts(reference: Path, other: Path) -> dict[str, dict[str, list]]:
    """What differs in run.json: {section: {name: [value of reference, value of other]}}.

    The sections are "arguments", "topology", "data", "versions" and "code"; one in which nothing
    differs is empty. None stands for a value that is null or not there. Paths are no difference:
    output_dir is left out, dataset too if the data's fingerprints are equal, and absolute paths
    with the same last part are equal.

    The topology is that of each step: a launch replaces what an earlier one did after its first
    step, and a value that changed at a later launch is shown with the step.
    """
    records = [read_record(folder) for folder in (reference, other)]
    data = [record.get("data") or {} for record in records]
    arguments = []
    for record in records:
        own = dict(record.get("arguments") or {})
        for name in NOT_COMPARED:
            own.pop(name, None)
        own["total_steps"] = record.get("total_steps")
        command = record.get("command") or [None]
        own["script"] = command[0] and Path(command[0]).name
        arguments.append(own)
    fingerprints = [own.get("fingerprint") for own in data]
    if fingerprints[0] == fingerprints[1] and fingerprints[0] is not None:
        arguments = [{k: v for k, v in own.items() if k != "dataset"} for own in arguments]
        data = [{k: v for k, v in own.items() if k != "dataset"} for own in data]
    return {
        "arguments": pairs(*arguments),
        "topology": pairs(*(topology(record.get("launches") or []) for record in records)),
        "data": pairs(*data),
        "versions": pairs(*(record.get("versions") or {} for record in records)),
        "code": pairs(*({"git_commit": record.get("git_commit")} for record in records)),
    }


def pairs(reference: dict, other: dict) -> dict[str, list]:
    """The names whose values differ, with both values."""
    differ = {}
    for name in {**reference, **other}:
        values = [reference.get(name), other.get(name)]
        if values[0] != values[1] and not same_file_name(*values):
            differ[name] = values
    return differ


def same_file_name(first, second) -> bool:
    """Whether both are absolute paths whose last part is the same."""
    for value in (first, second):
        if not isinstance(value, str) or not Path(value).is_absolute():
            return False
    return Path(first).name == Path(second).name


def topology(launches: list[dict]) -> dict[str, object]:
    """The topology of a run by name; "1, from step 20: 2" where a later launch changed it."""
    valid = []
    for launch in launches:
        first = launch.get("from_step", 0)
        valid = [earlier for earlier in valid if earlier.get("from_step", 0) < first]
        valid.append(launch)
    facts = [launch_facts(launch) for launch in valid]
    result = {}
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        changes = [""]
        for position in range(1, len(values)):
            if values[position] != values[position - 1]:
                step = valid[position].get("from_step", 0)
                changes.append(f"from step {step}: {as_text(values[position])}")
        first = values[0] if len(changes) == 1 else as_text(values[0])
        result[name] = first + ", ".join(changes) if len(changes) > 1 else first
    result[LAUNCHES] = ", ".join(str(launch.get("from_step", 0)) for launch in launches)
    return result


def launch_facts(launch: dict) -> dict[str, object]:
    """What of a launch is topology; of its processes, the number and kind of devices."""
    facts = {name: value for name, value in launch.items() if name not in NO_TOPOLOGY}
    processes = launch.get("processes") or []
    names = [each.get("device_name") or str(each.get("device")) for each in processes]
    counts = sorted(Counter(names).items())
    threads = sorted({str(each.get("cpu_threads")) for each in processes})
    facts["devices"] = ", ".join(f"{count} x {name}" for name, count in counts)
    facts["machines"] = len({each.get("host") for each in processes})
    facts["cpu_threads"] = ", ".join(threads)
    return facts


# Metrics


def compare_metrics(reference: Path, other: Path, tolerance: float = TOLERANCE) -> dict:
    """Compare metrics.jsonl at the steps that both runs have.

    The relative difference of two values is |a - b| / max(|a|, |b|): from 0 to 2, infinite if only
    one of them is NaN or infinite, and 0 if both are NaN. Timings are not compared. A line of the
    split "train" is the mean over the steps since the line before; it is compared only if that
    one is at the same step in both.

    Returns:
        "metrics": a list, in the order of the reference, of dicts with "split", "metric", "lines"
            (number compared), "first" ({"step", "values"} of the first difference beyond the
            tolerance, or None), "largest", "largest_step", and "differences" ([step, value] each).
        "only": names, such as "test loss", that one run alone has: [in reference, in other].
        "lines": number of lines compared.
        "lines_only": number of lines, up to `last_step`, that one run alone has: [in reference, in
            other].
        "other_means": number of train lines not compared, because they are means of other steps.
        "last_step": up to which the runs can be compared, the smaller one of their last steps.
    """
    lines = [read_metrics(folder) for folder in (reference, other)]
    last_step = min(max((line["step"] for line in own), default=0) for own in lines)
    places = []
    for own in lines:
        own = [line for line in own if line["step"] <= last_step]
        places.append(lines_by_place(own))
    names = [metric_names(own) for own in places]
    found = {}
    compared, other_means = 0, 0
    for place, (line, since) in places[0].items():
        if place not in places[1]:
            continue
        other_line, other_since = places[1][place]
        split, step, _ = place
        if split == "train" and since != other_since:
            other_means += 1
            continue
        compared += 1
        for name, value in line.items():
            if name in ("split", "step") or name not in other_line:
                continue
            difference = relative_difference(value, other_line[name])
            entry = found.setdefault((split, name), new_entry(split, name))
            entry["lines"] += 1
            entry["differences"].append([step, difference])
            if difference > entry["largest"]:
                entry["largest"], entry["largest_step"] = difference, step
            if difference > tolerance and entry["first"] is None:
                entry["first"] = {"step": step, "values": [value, other_line[name]]}
    entries = list(found.values())
    entries.sort(key=lambda entry: names[0].index(f"{entry['split']} {entry['metric']}"))
    return {
        "metrics": entries,
        "only": [
            [name for name in names[0] if name not in names[1]],
            [name for name in names[1] if name not in names[0]],
        ],
        "lines": compared,
        "lines_only": [len(places[0].keys() - places[1]), len(places[1].keys() - places[0])],
        "other_means": other_means,
        "last_step": last_step,
    }


def new_entry(split: str, name: str) -> dict:
    return {
        "split": split,
        "metric": name,
        "lines": 0,
        "first": None,
        "largest": 0.0,
        "largest_step": None,
        "differences": [],
    }


def lines_by_place(lines: list[dict]) -> dict[tuple[str, int, int], tuple[dict, int]]:
    """{(split, step, how many lines of both came before): (line, step of the split's line before)}.

    A script may log several lines of a split at one step.
    """
    places, last_steps = {}, {}
    counts = Counter()
    for line in lines:
        split, step = line["split"], line["step"]
        places[split, step, counts[split, step]] = (line, last_steps.get(split, 0))
        counts[split, step] += 1
        last_steps[split] = step
    return places


def metric_names(places: dict) -> list[str]:
    """Split and metric as in "test loss", in the order of the lines."""
    names = {}
    for line, _ in places.values():
        for name in line:
            if name not in ("split", "step"):
                names[f"{line['split']} {name}"] = None
    return list(names)


def relative_difference(first: float, second: float) -> float:
    """|a - b| / max(|a|, |b|); see `compare_metrics`."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not math.isfinite(first) or not math.isfinite(second):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


# Tensors


def compare_tensors(reference: Path, other: Path) -> dict:
    """Compare the newest checkpoint step that both runs have, else their final models.

    Of each tensor: the largest difference of two entries, divided by the largest entry of the
    reference's tensor, both absolute. An entry that is NaN or infinite in only one of them makes it
    infinite. The tensors are read one at a time. Random states are not compared.

    Returns:
        "source": what was compared, as text; None if there was nothing.
        "why": why there was nothing.
        "step": of the checkpoint; None for the final models.
        "tensors": a list of dicts with "part" (the name of the file), "kind" ("model", "optimizer"
            or "other"), "name", "shape", "difference", "bitwise" (whether all bits are equal).
        "mismatches": sentences that name tensors or files that one run alone has, or that are of
            another shape or dtype.
        "state": of what is no tensor (the schedule's state, for instance), a list of dicts with
            "name", "values" and "difference" for everything that differs.
    """
    folders = [Path(reference), Path(other)]
    result = {"source": None, "why": None, "step": None}
    result |= {"tensors": [], "mismatches": [], "state": []}
    in_both = set(checkpoint_steps(folders[0])) & set(checkpoint_steps(folders[1]))
    if in_both:
        result["step"] = max(in_both)
        result["source"] = f"the checkpoint of step {result['step']}"
        folders = [folder / "checkpoints" / f"step_{result['step']:08d}" for folder in folders]
        states = [read_json(folder / "manifest.json").get("state") or {} for folder in folders]
        compare_states(states[0], states[1], "", result["state"])
    else:
        result["why"] = why_not_final(*folders)
        if result["why"]:
            return result
        result["source"] = "the final models"
        states = [{}, {}]
    files = [tensor_files(folder) for folder in folders]
    for part in dict.fromkeys([*files[0], *files[1]]):
        if part not in files[0] or part not in files[1]:
            where = "reference" if part in files[0] else "other run"
            result["mismatches"].append(f"{part}.safetensors is only in the {where}")
            continue
        kind = "model"
        if part in states[0]:
            is_optimizer = isinstance(states[0][part], dict) and "groups" in states[0][part]
            kind = "optimizer" if is_optimizer else "other"
        compare_files(kind, part, files[0][part], files[1][part], result)
    return result


def tensor_files(folder: Path) -> dict[str, Path]:
    """The files of tensors by part, without random states and the best model beside the last."""
    files = {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
    files.pop("processes", None)
    for part in list(files):
        if part.endswith("_best") and part.removesuffix("_best") in files:
            del files[part]
    return files


def why_not_final(reference: Path, other: Path) -> str | None:
    """Why there are no final models that can be compared, as text; None if there are."""
    steps = []
    for folder in (reference, other):
        if not tensor_files(folder):
            return "no checkpoint step is in both runs, and not both have a final model"
        steps.append(progress(folder)["step"])
    if steps[0] != steps[1]:
        return (
            "no checkpoint step is in both runs, and the final models are of different steps, "
            f"{steps[0]} and {steps[1]}"
        )
    return None


def compare_states(reference, other, path: str, found: list[dict]) -> None:
    """Append to `found` what differs in two JSON values."""
    if path.rpartition(".")[2] in IMPLEMENTATION:
        return
    kinds = (type(reference), type(other))
    if kinds == (list, list):
        reference, other = dict(enumerate(reference)), dict(enumerate(other))
    if isinstance(reference, dict) and isinstance(other, dict):
        for name in {**reference, **other}:
            inner = f"{path}.{name}" if path else str(name)
            compare_states(reference.get(name), other.get(name), inner, found)
        return
    difference = 0.0 if reference == other else math.inf
    if is_number(reference) and is_number(other):
        difference = relative_difference(reference, other)
    if difference:
        # The names of a split state_dict, {"dict": {"total_steps": 8}}, say nothing to a reader.
        name = path.replace(".dict.", ".").replace(".list.", ".")
        found.append({"name": name, "values": [reference, other], "difference": difference})


def compare_files(kind: str, part: str, reference: Path, other: Path, result: dict) -> None:
    """Compare two files of tensors, one tensor at a time, and add what was found to `result`."""
    from safetensors import SafetensorError, safe_open

    path = reference
    try:
        with safe_open(reference, "pt") as first:
            path = other
            with safe_open(other, "pt") as second:
                names = set(second.keys())
                for name in sorted(names | set(first.keys())):
                    if name not in names or name not in first.keys():  # noqa: SIM118  no container
                        where = "other run" if name in names else "reference"
                        result["mismatches"].append(f"{part}: {name} is only in the {where}")
                        continue
                    path = reference
                    mine = first.get_tensor(name)
                    path = other
                    theirs = second.get_tensor(name)
                    problem = other_form(mine, theirs)
                    if problem:
                        result["mismatches"].append(f"{part}: {name} {problem}")
                        continue
                    entry = {"part": part, "kind": kind, "name": name, "shape": list(mine.shape)}
                    entry["bitwise"] = same_bits(mine, theirs)
                    entry["difference"] = 0.0
                    if not entry["bitwise"]:
                        entry["difference"] = tensor_difference(mine, theirs)
                    result["tensors"].append(entry)
    except (OSError, SafetensorError) as error:
        stop(f"{path} cannot be read: {str(error).splitlines()[0]}")


def other_form(first, second) -> str | None:
    """In what shape and dtype two tensors differ, as text."""
    forms = []
    for tensor in (first, second):
        forms.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
    if forms[0] == forms[1]:
        return None
    (dtype, shape), (other_dtype, other_shape) = forms
    if shape == other_shape:
        return f"is {dtype} and {other_dtype}"
    if dtype == other_dtype:
        return f"has the shape {shape} and {other_shape}"
    return f"is {dtype} {shape} and {other_dtype} {other_shape}"


def same_bits(first, second) -> bool:
    """Whether two tensors of the same shape and dtype are equal bit for bit."""
    import torch

    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*as_bytes)


def tensor_difference(first, second) -> float:
    """The largest difference, divided by the largest finite entry of `first`, both absolute.

    Two NaN are equal here. Infinite: something is finite in one of the tensors only, or `first` is
    zero.
    """
    import torch

    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    largest = largest_entry = 0.0
    chunks = zip(first.reshape(-1).split(CHUNK), second.reshape(-1).split(CHUNK), strict=True)
    for mine, theirs in chunks:
        mine, theirs = mine.to(torch.float64), theirs.to(torch.float64)
        finite = mine.isfinite() & theirs.isfinite()
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        if not (finite | same).all():
            return math.inf
        differences = torch.where(finite, mine - theirs, 0.0).abs()
        entries = torch.where(mine.isfinite(), mine, 0.0).abs()
        largest = max(largest, differences.max().item())
        largest_entry = max(largest_entry, entries.max().item())
    if largest == 0:  # 0 and -0, or two NaN of other bits
        return 0.0
    return largest / largest_entry if largest_entry else math.inf


# The verdict


def judge(facts: dict, metrics: dict, tensors: dict, tolerance: float = TOLERANCE) -> dict:
    """What the comparisons say together, for the results of the functions of these names.

    Returns:
        "same": whether everything compared is within the tolerance; None if nothing was.
        "bitwise": whether it is equal bit for bit.
        "sentence": such as "different: first at step 5 in train loss".
        "hint": what else differs and can be the reason, as text; "" if all is the same.
    """
    if not metrics["metrics"] and not tensors["tensors"] and not tensors["mismatches"]:
        sentence = "nothing to compare: no line of metrics and no checkpoint step is in both runs"
        return {"same": None, "bitwise": False, "sentence": sentence, "hint": ""}
    sentence = first_difference(metrics, tensors, tolerance)
    hint = explain(facts)
    if sentence:
        return {"same": False, "bitwise": False, "sentence": f"different: {sentence}", "hint": hint}
    largest, where = largest_difference(metrics, tensors)
    bitwise = largest == 0 and all(each["bitwise"] for each in tensors["tensors"])
    if bitwise:
        sentence = "bit for bit the same"
        if tensors["source"] is None:
            sentence += " in the metrics; no tensors were compared"
        elif not metrics["metrics"]:
            sentence += f" in {tensors['source']}; no metrics were compared"
        return {"same": True, "bitwise": True, "sentence": sentence, "hint": ""}
    place = f"{largest:.1e} in {where}" if where else "0 and -0 in a tensor"
    sentence = f"the same within the tolerance (largest difference {place})"
    return {"same": True, "bitwise": False, "sentence": sentence, "hint": hint}


def first_difference(metrics: dict, tensors: dict, tolerance: float) -> str | None:
    """The first difference beyond the tolerance as text: of the metrics, else of the tensors."""
    beyond = [entry for entry in metrics["metrics"] if entry["first"]]
    if beyond:
        entry = min(beyond, key=lambda entry: entry["first"]["step"])
        return f"first at step {entry['first']['step']} in {entry['split']} {entry['metric']}"
    if tensors["mismatches"]:
        return f"in {tensors['source']}, {tensors['mismatches'][0]}"
    worst = max(tensors["tensors"], key=lambda each: each["difference"], default=None)
    if worst and worst["difference"] > tolerance:
        return f"in {tensors['source']}, {worst['part']} {worst['name']}"
    state = max(tensors["state"], key=lambda each: each["difference"], default=None)
    if state and state["difference"] > tolerance:
        return f"in {tensors['source']}, {state['name']}"
    return None


def largest_difference(metrics: dict, tensors: dict) -> tuple[float, str]:
    """The largest difference of all, and where it is; (0.0, "") if there is none."""
    found = [(0.0, "")]
    for entry in metrics["metrics"]:
        where = f"{entry['split']} {entry['metric']} at step {entry['largest_step']}"
        found.append((entry["largest"], where))
    for entry in tensors["tensors"]:
        found.append((entry["difference"], f"{entry['part']} {entry['name']}"))
    for entry in tensors["state"]:
        found.append((entry["difference"], entry["name"]))
    return max(found, key=lambda each: each[0])


def explain(facts: dict) -> str:
    """The names that differ and can be the reason of a difference, by section, as text."""
    reasons = []
    for section, differ in facts.items():
        names = [name for name in differ if name not in (*WITHOUT_EFFECT, LAUNCHES)]
        if names:
            reasons.append(f"{section} ({', '.join(names)})")
    if reasons:
        return f"what can explain it: {', '.join(reasons)}"
    if LAUNCHES in facts["topology"]:
        return "nothing that is recorded explains it, but they were resumed at different steps"
    return "nothing that is recorded explains it"


# Text


def as_text(value) -> str:
    """A value for a table, on one line and shortened."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def both_texts(first: float, second: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see that they differ, at least six."""
    for digits in range(6, 18):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def difference_text(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


def table(rows: list[list[str]], right: tuple[int, ...] = ()) -> list[str]:
    """Lines of aligned columns. right: the columns that are aligned at their right end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def short_names(folders: list[Path]) -> list[str]:
    """A name for each folder: as many of the last parts of its path as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    distinct = len(set(parts))
    for length in range(1, max(len(each) for each in parts) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == distinct:
            break
    for place, name in enumerate(names):
        if name in names[:place]:  # a folder that is compared with itself
            names[place] = f"{name} ({place + 1})"
    return names


def progress_text(far: dict) -> str:
    text = f"step {far['step']}"
    if far["total_steps"]:
        text += f" of {far['total_steps']}"
    if far["finished"]:
        return text + (", stopped early" if far["stopped_early"] else ", finished")
    text += ", not finished: it goes on, or was stopped"
    if far["checkpoint"] is not None:
        text += f"; newest checkpoint at step {far['checkpoint']}"
    return text


def facts_text(facts: dict, names: list[str], commit: str | None) -> list[str]:
    """The tables of `compare_facts`' result. commit: of the reference."""
    lines, same = [], []
    for section, differ in facts.items():
        if not differ:
            same.append(section)
            continue
        rows = [["", *names]]
        for name, values in differ.items():
            if name == "git_commit":
                values = [value and value[:10] + "+" * value.endswith("+") for value in values]
            rows.append([name, *(as_text(value) for value in values)])
        lines += [section.capitalize(), *table(rows)]
    if same:
        lines.append(f"No difference in {', '.join(same)}")
    if not facts["code"] and commit and commit.endswith("+"):
        lines.append("  both runs had changes that were not committed: the code can still differ")
    return lines


def metrics_text(metrics: dict, names: list[str], tolerance: float) -> list[str]:
    """The table of `compare_metrics`' result, and what was not compared."""
    compared = f"{plural(metrics['lines'], 'line')} up to step {metrics['last_step']}"
    lines = [f"Metrics: {compared}, relative differences"]
    heads = [f"first beyond {tolerance:g}", *(f"in {name}" for name in names)]
    rows = [["split", "metric", "lines", "largest", "", *heads]]
    for entry in metrics["metrics"]:
        largest_step = f"at step {entry['largest_step']}" if entry["largest"] else ""
        first = ["none", "", ""]
        if entry["first"]:
            first = [f"step {entry['first']['step']}", *both_texts(*entry["first"]["values"])]
        row = [entry["split"], entry["metric"], str(entry["lines"])]
        rows.append([*row, difference_text(entry["largest"]), largest_step, *first])
    if not any(entry["first"] for entry in metrics["metrics"]):
        rows = [row[:5] for row in rows]
    if metrics["metrics"]:
        lines += table(rows, right=(2, 3, 6, 7))
    for name, only, count in zip(names, metrics["only"], metrics["lines_only"], strict=True):
        if only:
            lines.append(f"  only in {name}: {', '.join(only)}")
        if count:
            lines.append(f"  {plural(count, 'line')} only in {name}")
    if metrics["other_means"]:
        count = plural(metrics["other_means"], "train line")
        lines.append(f"  {count} not compared: means over different steps, see log_every")
    return lines


def tensors_text(tensors: dict, names: list[str], limit: int | None) -> list[str]:
    """The table of `compare_tensors`' result. limit: how many tensors are shown; None: all."""
    if tensors["source"] is None:
        return [f"Tensors: none compared, {tensors['why']}"]
    entries = tensors["tensors"]
    lines = [f"Tensors of {tensors['source']}, largest difference / largest entry of {names[0]}'s tensor"]
    for part in dict.fromkeys(entry["part"] for entry in entries):
        own = [entry for entry in entries if entry["part"] == part]
        equal = sum(entry["bitwise"] for entry in own)
        kind = "" if own[0]["kind"] in (part, "other") else f" ({own[0]['kind']})"
        lines.append(f"  {part}{kind}: {equal} of {plural(len(own), 'tensor')} bitwise equal")
    shown = sorted(entries, key=lambda entry: (entry["bitwise"], -entry["difference"]))
    if limit is not None:
        shown = [entry for entry in shown if not entry["bitwise"]]
    more = len(shown) - len(shown[:limit])
    rows = []
    for entry in shown[:limit]:
        shape = "x".join(str(size) for size in entry["shape"]) or "scalar"
        difference = "equal" if entry["bitwise"] else difference_text(entry["difference"])
        rows.append([entry["part"], entry["name"], shape, difference])
    if rows:
        lines += table([["part", "tensor", "shape", "difference"], *rows], right=(3,))
    if more:
        lines.append(f"  and {more} more with smaller differences: --all shows them")
    for sentence in tensors["mismatches"]:
        sentence = sentence.replace("only in the reference", f"only in {names[0]}")
        lines.append("  " + sentence.replace("only in the other run", f"only in {names[1]}"))
    if tensors["state"]:
        rows = [["not a tensor", *names, "difference"]]
        for entry in tensors["state"]:
            texts = [as_text(value) for value in entry["values"]]
            rows.append([entry["name"], *texts, difference_text(entry["difference"])])
        lines += table(rows, right=(3,))
    return lines


# The command


def curves_of(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The metrics of a run as {metric: {split: [(step, value), ...]}}, with finite values only."""
    curves = {}
    for line in read_metrics(folder):
        for name, value in line.items():
            if name not in ("split", "step") and math.isfinite(value):
                splits = curves.setdefault(name, {})
                splits.setdefault(line["split"], []).append((line["step"], value))
    return curves


def differences_of(metrics: dict) -> dict[str, dict[str, list]]:
    """The relative differences in `compare_metrics`' result, in the form of `curves_of`."""
    found = {}
    for entry in metrics["metrics"]:
        found.setdefault(entry["metric"], {})[entry["split"]] = entry["differences"]
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.compare", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("reference", type=Path, metavar="RUN", help="the folder of the run to compare with")
    add("others", type=Path, nargs="+", metavar="OTHER", help="folders of other runs")
    add(
        "--tolerance",
        type=at_least(0.0, float),
        default=TOLERANCE,
        metavar="X",
        help=f"largest relative difference that counts as the same (default: {TOLERANCE:g})",
    )
    add("--all", action="store_true", help=f"show every tensor, not only the worst {WORST}")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="PNG of the curves and their differences (default: compare.png in the first OTHER)",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    folders = [args.reference, *args.others]
    records = [read_record(folder) for folder in folders]
    names = short_names(folders)
    rows = []
    for name, folder in zip(names, folders, strict=True):
        role = "reference" if not rows else ""
        rows.append([name, str(folder), progress_text(progress(folder)), role])
    print("\n".join(table(rows)))

    pictured = {names[0]: (curves_of(folders[0]), {})}
    verdicts = []
    for name, folder in zip(names[1:], args.others, strict=True):
        result = compare(args.reference, folder, args.tolerance)
        both = [names[0], name]
        lines = ["", f"{name} compared with {names[0]}", ""]
        lines += [*facts_text(result["facts"], both, records[0].get("git_commit")), ""]
        lines += [*metrics_text(result["metrics"], both, args.tolerance), ""]
        lines += tensors_text(result["tensors"], both, None if args.all else WORST)
        print("\n".join(lines))
        pictured[name] = (curves_of(folder), differences_of(result["metrics"]))
        verdicts.append(result["verdict"])

    print()
    for name, verdict in zip(names[1:], verdicts, strict=True):
        colour = "green" if verdict["same"] else "red"
        hint = f"; {verdict['hint']}" if verdict["hint"] else ""
        show(f"{name}: {verdict['sentence']}{hint}", colour)
    picture = args.picture or args.others[0] / "compare.png"
    plot_comparison(pictured, args.tolerance, picture)
    if any(verdict["same"] is None for verdict in verdicts):
        return 2
    return int(not all(verdict["same"] for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
