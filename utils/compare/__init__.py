"""Compare runs: where their numbers begin to differ, by how much, and what else differs.

    python -m utils.compare runs/a runs/b

The first folder is the reference, and each other one is compared with it. The exit code is 0 if the numbers are the
same within the tolerance, 1 if they are not, and 2 if a folder does not hold a run or there is nothing to compare. A
run that goes on or was killed is compared as far as it got.

For other programs: `compare_facts`, `compare_metrics`, `compare_tensors` and `judge` return dicts, and `compare` calls
all four. The values in them are JSON, but a difference can be infinite.
"""

import argparse
import math
import re
import traceback
from collections import Counter
from pathlib import Path

from ..best import is_number
from ..console import show, stop
from ..flags import non_negative_float
from . import runs, text
from .differences import number_difference, same_bits, tensor_difference
from .runs import progress

TOLERANCE = 1e-6
OTHER_SAMPLES = 1e-4  # of the samples behind a count, such as an accuracy, may count differently, and always one
WORST = 10  # tensors in the table
# Not in the table of arguments: where a run writes, and whether it was resumed.
NOT_COMPARED = ("output_dir", "resume")
# In that table, but no metric or tensor depends on them.
WITHOUT_EFFECT = ("checkpoint_every", "save_best", "keep_checkpoints", "log_every", "log_with", "num_workers")
WITHOUT_EFFECT += ("patience", "predict", "profile", "timeout_s")
# What a launch has in run.json and what is not topology, or is described by `devices`.
NOT_TOPOLOGY = ("started", "from_step", "config_file", "processes")
# With virtual processes the bits do not depend on these.
NOT_WITH_VIRTUAL = ("distributed_type", "backend", "num_processes", "data_parallel_gpus", "machines")
NOT_WITH_VIRTUAL += ("gradient_accumulation_steps",)
LAUNCHES = "launched at step"
# How an optimizer computes its step, and not what it is.
IMPLEMENTATION = ("fused", "foreach", "capturable")


def compare(reference: Path, other: Path, tolerance: float = TOLERANCE) -> dict:
    """Compare two run folders: {"facts", "metrics", "tensors", "verdict"}, one for each function.

    Raises:
        SystemExit: if a folder does not hold a run or a file in it cannot be read.
    """
    facts = compare_facts(reference, other)
    metrics = compare_metrics(reference, other, tolerance)
    tensors = compare_tensors(reference, other)
    virtual = [runs.read_record(folder)["arguments"].get("virtual_processes") for folder in (reference, other)]
    verdict = judge(facts, metrics, tensors, tolerance, virtual_processes=bool(virtual[0]) and virtual[0] == virtual[1])
    return {"facts": facts, "metrics": metrics, "tensors": tensors, "verdict": verdict}


# What differs besides the numbers


def compare_facts(reference: Path, other: Path) -> dict[str, dict[str, list]]:
    """What differs in run.json: {section: {name: [value of reference, value of other]}}.

    The sections are "arguments", "topology", "data", "versions" and "code"; one in which nothing differs is empty. None
    stands for a value that is null or not there. Paths are no difference: output_dir is left out, dataset too if the
    data's fingerprints are equal, and absolute paths with the same last part are equal.

    The topology is that of each step: a launch replaces what an earlier one did after its first step, and a value that
    changed at a later launch is shown with the step.
    """
    records = [runs.read_record(folder) for folder in (reference, other)]
    data = [record["data"] for record in records]
    arguments = []
    for record in records:
        script = Path(str(record["command"][0])).name if record["command"] else None
        more = {"total_steps": record["total_steps"], "script": script}
        arguments.append({name: v for name, v in record["arguments"].items() if name not in NOT_COMPARED} | more)
    fingerprint = data[0].get("fingerprint")
    if fingerprint is not None and fingerprint == data[1].get("fingerprint"):
        for facts in (*arguments, *data):
            facts.pop("dataset", None)
    return {
        "arguments": pairs(*arguments),
        "topology": pairs(*(topology(record["launches"]) for record in records)),
        "data": pairs(*data),
        "versions": pairs(*(record["versions"] for record in records)),
        "code": pairs(*({"git_commit": record["git_commit"]} for record in records)),
    }


def pairs(reference: dict, other: dict) -> dict[str, list]:
    """The names whose values differ, with both values."""
    found = {name: [reference.get(name), other.get(name)] for name in {**reference, **other}}
    return {name: values for name, values in found.items() if without_folder(values[0]) != without_folder(values[1])}


def without_folder(value):
    """The last part of an absolute path; any other value as it is."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


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
        changes = [
            f"from step {valid[place].get('from_step', 0)}: {text.as_text(value)}"
            for place, value in enumerate(values)
            if place and value != values[place - 1]
        ]
        result[name] = ", ".join([text.as_text(values[0]), *changes]) if changes else values[0]
    result[LAUNCHES] = ", ".join(str(launch.get("from_step", 0)) for launch in launches)
    return result


def launch_facts(launch: dict) -> dict[str, object]:
    """What of a launch is topology; of its processes, the number and kind of devices."""
    facts = {name: value for name, value in launch.items() if name not in NOT_TOPOLOGY}
    processes = launch.get("processes") or []
    counts = Counter(str(each.get("device_name") or each.get("device")) for each in processes)
    facts["devices"] = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    facts["machines"] = len({str(each.get("host")) for each in processes})
    facts["cpu_threads"] = ", ".join(sorted({str(each.get("cpu_threads")) for each in processes}))
    return facts


# Metrics


def compare_metrics(reference: Path, other: Path, tolerance: float = TOLERANCE) -> dict:
    """Compare metrics.jsonl at the steps that both runs have.

    The relative difference of two values is |a - b| / max(|a|, |b|), see `number_difference`. Timings are not compared.
    A line of the split "train" is the mean over the steps since the line before; it is compared only if that one is at
    the same step in both. A metric that counts samples, such as an accuracy, is a multiple of 1 / samples: one
    prediction that rounding flips is not beyond the tolerance, see OTHER_SAMPLES.

    Returns:
        "metrics": a list, in the order of the reference, of dicts with "split", "metric", "lines" (number compared),
            "first" ({"step", "values"} of the first difference beyond the tolerance, or None), "largest",
            "largest_step", "differences" ([step, value] each), and "other_samples": the most samples of a line that a
            count within the tolerance differs by.
        "only": names, such as "test loss", that one run alone has: [in reference, in other].
        "lines": number of lines compared.
        "lines_only": number of lines, up to `last_step`, that one run alone has: [in reference, in other].
        "other_means": number of train lines not compared, because they are means of other steps.
        "last_step": up to which the runs can be compared, the smaller one of their last steps.
    """
    folders = (reference, other)
    lines = [runs.read_metrics(folder) for folder in folders]
    last_step = min(max((line["step"] for line in own), default=0) for own in lines)
    places = [lines_by_place([line for line in own if line["step"] <= last_step]) for own in lines]
    record = runs.read_record(reference)
    # In the order of the reference's lines, each metric once.
    entries = {name: new_entry(*name) for name in metric_names(places[0])}
    compared = other_means = 0
    for (split, step, number), (line, since) in places[0].items():
        other_line, other_since = places[1].get((split, step, number), (None, None))
        if other_line is None:
            continue
        if split == "train" and since != other_since:
            other_means += 1
            continue
        compared += 1
        samples = runs.train_samples(record, since, step) if split == "train" else []
        if line.get("samples") == other_line.get("samples"):
            samples.append(line.get("samples"))
        for name in (name for name in line if name not in ("split", "step") and name in other_line):
            add_values(entries[split, name], step, (line[name], other_line[name]), samples, tolerance)
    names = [[" ".join(name) for name in metric_names(own)] for own in places]
    return {
        "metrics": [entry for entry in entries.values() if entry["lines"]],
        "only": [[name for name in names[i] if name not in names[1 - i]] for i in (0, 1)],
        "lines": compared,
        "lines_only": [len(places[0].keys() - places[1]), len(places[1].keys() - places[0])],
        "other_means": other_means,
        "last_step": last_step,
    }


def new_entry(split: str, metric: str) -> dict:
    entry = {"split": split, "metric": metric, "lines": 0, "first": None, "largest": 0.0, "largest_step": None}
    return entry | {"differences": [], "other_samples": 0}


def add_values(entry: dict, step: int, values: tuple[float, float], samples: list, tolerance: float) -> None:
    """Count the values of a metric in a line of both runs. samples: how many they may be the mean of."""
    difference = number_difference(*values)
    entry["lines"] += 1
    entry["differences"].append([step, difference])
    if difference > entry["largest"]:
        entry["largest"], entry["largest_step"] = difference, step
    if difference <= tolerance:
        return
    count, total = next(filter(None, (other_samples(*values, total) for total in samples)), (math.inf, 0))
    if tolerance and count <= max(1, total * OTHER_SAMPLES):
        entry["other_samples"] = max(entry["other_samples"], count)
    elif entry["first"] is None:
        entry["first"] = {"step": step, "values": list(values)}


def other_samples(first: float, second: float, total: float | None) -> tuple[int, float] | None:
    """By how many of `total` samples two values differ, and `total`; None if these are not counts / total."""
    if not total or not 0 <= min(first, second) <= max(first, second) <= 1:
        return None
    counts = [value * total for value in (first, second)]
    if any(abs(count - round(count)) > 1e-6 for count in counts):
        return None
    return abs(round(counts[0]) - round(counts[1])), total


def lines_by_place(lines: list[dict]) -> dict[tuple[str, int, int], tuple[dict, int]]:
    """{(split, step, how many lines of both came before): (line, step of the split's line before)}.

    A script may log several lines of a split at one step.
    """
    places, last_steps, counts = {}, {}, Counter()
    for line in lines:
        split, step = line["split"], line["step"]
        places[split, step, counts[split, step]] = (line, last_steps.get(split, 0))
        counts[split, step] += 1
        last_steps[split] = step
    return places


def metric_names(places: dict) -> list[tuple[str, str]]:
    """Split and metric, in the order of the lines."""
    names = ((line["split"], name) for line, _ in places.values() for name in line if name not in ("split", "step"))
    return list(dict.fromkeys(names))


# Tensors


def compare_tensors(reference: Path, other: Path) -> dict:
    """Compare the newest checkpoint step that both runs have, else their final models.

    Of each tensor: see `tensor_difference`. The tensors are read one at a time. Random states are not compared.

    Returns:
        "source": what was compared, as text; None if there was nothing.
        "why": why there was nothing.
        "step": of the checkpoint; None for the final models.
        "tensors": a list of dicts with "part" (the name of the file), "kind" ("model", "optimizer" or "other"), "name",
            "shape", "difference", "bitwise" (whether all bits are equal).
        "mismatches": sentences that name tensors or files that one run alone has, or that are of another shape or
            dtype.
        "state": of what is not a tensor (the schedule's state, for instance), a list of dicts with "name", "values" and
            "difference" for everything that differs.
    """
    folders = [Path(reference), Path(other)]
    result = {"source": None, "why": None, "step": None, "tensors": [], "mismatches": [], "state": []}
    in_both = set(runs.checkpoint_steps(folders[0])) & set(runs.checkpoint_steps(folders[1]))
    states = [{}, {}]
    if in_both:
        result["step"] = max(in_both)
        result["source"] = f"the checkpoint of step {result['step']}"
        folders = [folder / "checkpoints" / f"step_{result['step']:08d}" for folder in folders]
        states = [runs.read_json(folder / "manifest.json").get("state") or {} for folder in folders]
        compare_states(*states, "", result["state"])
    else:
        result["why"] = why_not_final(*folders)
        if result["why"]:
            return result
        result["source"] = "the final models"
    files = [tensor_files(folder) for folder in folders]
    for part in dict.fromkeys([*files[0], *files[1]]):
        if part not in files[0] or part not in files[1]:
            where = "reference" if part in files[0] else "other run"
            result["mismatches"].append(f"{part}.safetensors is only in the {where}")
            continue
        kind = "model"
        if isinstance(states[0], dict) and part in states[0]:
            is_optimizer = isinstance(states[0][part], dict) and "groups" in states[0][part]
            kind = "optimizer" if is_optimizer else "other"
        compare_files(kind, part, files[0][part], files[1][part], result)
    return result


def tensor_files(folder: Path) -> dict[str, Path]:
    """The files of tensors by part, without the metrics of the processes and the best model beside the last."""
    files = {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
    best = [part for part in files if part.endswith("_best") and part.removesuffix("_best") in files]
    return {part: path for part, path in files.items() if part != "processes" and part not in best}


def why_not_final(reference: Path, other: Path) -> str | None:
    """Why there are no final models that can be compared, as text; None if there are."""
    if not tensor_files(reference) or not tensor_files(other):
        return "no checkpoint step is in both runs, and not both have a final model"
    steps = [progress(folder)["step"] for folder in (reference, other)]
    if steps[0] == steps[1]:
        return None
    return f"no checkpoint step is in both runs, and the final models are of different steps, {steps[0]} and {steps[1]}"


def compare_states(reference, other, path: str, found: list[dict]) -> None:
    """Append to `found` what differs in two JSON values."""
    if path.rpartition(".")[2] in IMPLEMENTATION:
        return
    if isinstance(reference, list) and isinstance(other, list):
        reference, other = dict(enumerate(reference)), dict(enumerate(other))
    if isinstance(reference, dict) and isinstance(other, dict):
        for name in {**reference, **other}:
            compare_states(reference.get(name), other.get(name), f"{path}.{name}" if path else str(name), found)
        return
    difference = 0.0 if reference == other else math.inf
    if is_number(reference) and is_number(other):
        difference = number_difference(reference, other)
    if difference:
        # The names of a split state_dict, {"dict": {"total_steps": 8}}, say nothing to a reader.
        name = path.replace(".dict.", ".").replace(".list.", ".")
        found.append({"name": name, "values": [reference, other], "difference": difference})


def compare_files(kind: str, part: str, reference: Path, other: Path, result: dict) -> None:
    """Compare two files of tensors, one tensor at a time, and add what was found to `result`."""
    from safetensors import SafetensorError, safe_open

    for path in (reference, other):
        if not path.is_file():  # a pipe would wait for a writer
            stop(f"{path} cannot be read: it is not a regular file")
    path = reference
    try:
        with safe_open(reference, "pt") as first:
            path = other
            with safe_open(other, "pt") as second:
                names = [set(file.keys()) for file in (first, second)]
                for name in sorted(names[0] ^ names[1]):
                    where = "reference" if name in names[0] else "other run"
                    result["mismatches"].append(f"{part}: {name} is only in the {where}")
                for name in sorted(names[0] & names[1]):
                    path = reference
                    mine = first.get_tensor(name)
                    path = other
                    theirs = second.get_tensor(name)
                    if form(mine) != form(theirs):
                        result["mismatches"].append(f"{part}: {name} is {form(mine)} and {form(theirs)}")
                        continue
                    bitwise = same_bits(mine, theirs)
                    entry = {"part": part, "kind": kind, "name": name, "shape": list(mine.shape), "bitwise": bitwise}
                    entry["difference"] = 0.0 if bitwise else tensor_difference(mine, theirs)
                    result["tensors"].append(entry)
    except (OSError, SafetensorError) as error:
        stop(f"{path} cannot be read: {str(error).splitlines()[0]}")


def form(tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# The verdict


def judge(
    facts: dict, metrics: dict, tensors: dict, tolerance: float = TOLERANCE, virtual_processes: bool = False
) -> dict:
    """What the comparisons say together, for the results of the functions of these names.

    Args:
        virtual_processes: both runs had the same --virtual_processes, so that the number of processes explains nothing.

    Returns:
        "same": whether everything compared is within the tolerance; None if nothing was.
        "bitwise": whether it is equal bit for bit.
        "sentence": such as "different: first at step 5 in train loss".
        "hint": what else differs and can be the reason, as text; "" if all is the same.
    """
    if not metrics["metrics"] and not tensors["tensors"] and not tensors["mismatches"]:
        sentence = "nothing to compare: no line of metrics and no checkpoint step is in both runs"
        return {"same": None, "bitwise": False, "sentence": sentence, "hint": ""}
    hint = explain(facts, virtual_processes)
    if sentence := first_difference(metrics, tensors, tolerance):
        return {"same": False, "bitwise": False, "sentence": f"different: {sentence}", "hint": hint}
    largest, where = largest_difference(metrics, tensors)
    if largest == 0 and all(entry["bitwise"] for entry in tensors["tensors"]):
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
    for kind in ("tensors", "state"):
        difference, name = largest_difference({"metrics": []}, {"tensors": [], "state": []} | {kind: tensors[kind]})
        if difference > tolerance:
            return f"in {tensors['source']}, {name}"
    return None


def largest_difference(metrics: dict, tensors: dict) -> tuple[float, str]:
    """The largest difference of all, and where it is; (0.0, "") if there is none."""
    found = [(0.0, "")]
    for entry in metrics["metrics"]:
        found.append((entry["largest"], f"{entry['split']} {entry['metric']} at step {entry['largest_step']}"))
    for entry in (*tensors["tensors"], *tensors["state"]):
        found.append((entry["difference"], f"{entry['part']} {entry['name']}" if "part" in entry else entry["name"]))
    return max(found, key=lambda entry: entry[0])


def explain(facts: dict, virtual_processes: bool = False) -> str:
    """The names that differ and can be the reason of a difference, by section, as text."""
    reasons = []
    for section, differ in facts.items():
        names = [name for name in differ if name not in (*WITHOUT_EFFECT, LAUNCHES)]
        if virtual_processes:
            names = [name for name in names if name not in NOT_WITH_VIRTUAL]
            if "devices" in names and len({kinds_of_devices(value) for value in differ["devices"]}) == 1:
                names.remove("devices")
        if names:
            reasons.append(f"{section} ({', '.join(names)})")
    if reasons:
        return f"what can explain it: {', '.join(reasons)}"
    if LAUNCHES in facts["topology"]:
        return "nothing that is recorded explains it, but they were resumed at different steps"
    return "nothing that is recorded explains it"


def kinds_of_devices(devices: str | None) -> frozenset[str]:
    """Without their numbers: {"cpu"} of "1 x cpu, from step 10: 2 x cpu"."""
    return frozenset(re.findall(r"\d+ x ([^,]+)", devices or ""))


# The command


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("reference", type=Path, metavar="RUN", help="the folder of the run to compare with")
    add("others", type=Path, nargs="+", metavar="OTHER", help="folders of other runs")
    tolerance = f"largest relative difference that counts as the same (default: {TOLERANCE:g})"
    add("--tolerance", type=non_negative_float, default=TOLERANCE, metavar="X", help=tolerance)
    add("--all", action="store_true", help=f"show every tensor, not only the worst {WORST}")
    picture = "PNG of the curves and their differences (default: compare.png in the first OTHER)"
    add("--picture", type=Path, metavar="FILE", help=picture)
    return parser.parse_args()


def main() -> int:
    """Returns the exit code: also an error that nobody thought of is not "different"."""
    args = parse_args()
    try:
        return compare_all(args)
    except Exception:
        traceback.print_exc()
        return 2


def compare_all(args) -> int:
    folders = [args.reference, *args.others]
    commit = runs.read_record(args.reference)["git_commit"]
    names = text.short_names(folders)
    rows = []
    for name, folder in zip(names, folders, strict=True):
        role = "reference" if not rows else ""
        rows.append([name, str(folder), text.progress_text(progress(folder)), role])
    show_lines(text.table(rows))

    pictured = {names[0]: (runs.curves(folders[0]), {})}
    verdicts = []
    for name, folder in zip(names[1:], args.others, strict=True):
        result = compare(args.reference, folder, args.tolerance)
        both = [names[0], name]
        show_lines(["", f"{name} compared with {names[0]}", ""])
        show_lines([*text.facts_lines(result["facts"], both, commit), ""])
        show_lines([*text.metrics_lines(result["metrics"], both, args.tolerance), ""])
        show_lines(text.tensors_lines(result["tensors"], both, None if args.all else WORST))
        differences = {}
        for entry in result["metrics"]["metrics"]:
            differences.setdefault(entry["metric"], {})[entry["split"]] = entry["differences"]
        pictured[name] = (runs.curves(folder), differences)
        verdicts.append(result["verdict"])

    print()
    for name, verdict in zip(names[1:], verdicts, strict=True):
        hint = f"; {verdict['hint']}" if verdict["hint"] else ""
        show(f"{name}: {verdict['sentence']}{hint}", "green" if verdict["same"] else "red")
    if args.picture:
        from ..extras.curves import plot_comparison

        picture = args.picture
        plot_comparison(pictured, args.tolerance, picture)
    if any(verdict["same"] is None for verdict in verdicts):
        return 2
    return int(not all(verdict["same"] for verdict in verdicts))


def show_lines(lines: list[str]) -> None:
    for line in lines:
        show(line)
