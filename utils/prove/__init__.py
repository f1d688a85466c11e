"""Prove that a script trains the same model on any topology, or name the first thing that differs.

    python -m utils.prove mine.py [flags of the script]
    python -m utils.prove --updates 12 --keep proof/ mine.py --lr 0.1

Runs the script for a few updates on one process, with accumulation, on several processes, with
another number of data workers, and with a resume in the middle, and compares what it does in the
order in which things happen: samples, items, values of each sample, gradients, learning rates,
weights, optimizer state, test, files. The script must train through `Run` and `GlobalLoader`.
Nothing in it needs to be changed. With the flag --virtual_processes 6 of the script, all must agree
bit for bit. Ends with 0 if all agree, 1 if something differs, 2 if the script fails.
"""

import argparse
import collections
import concurrent.futures
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ..console import plural, show, stop

CAUSES = "utils/prove/CAUSES.md"
BATCH_SIZE = 12  # divides by 1, 2 and 3 processes, and by 2 accumulation steps on each
TIMEOUT_S = 600
ROUNDING = 1e-5  # a gradient this small, relative to the largest one, is zero up to rounding
ENDING = "_batches_tracked"  # counts of BatchNorm: not a result
# What rounding can change.
NUMBERS = {"values", "gradients", "gradients at the step", "weights", "optimizer"}
NUMBERS |= {"test values", "test result"}

CPU = """compute_environment: LOCAL_MACHINE
distributed_type: "NO"
num_processes: 1
use_cpu: true
mixed_precision: "{precision}"
mpirun_config:
  num_cpu_threads_per_process: 1
  quiet: true
"""
CPU_DDP = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: {processes}
gpu_ids: "-1,-1"
mixed_precision: "{precision}"
"""
SINGLE_GPU = CPU.replace("use_cpu: true", 'gpu_ids: "0"')
DDP = CPU_DDP.replace('gpu_ids: "-1,-1"', "gpu_ids: all")


class Variant(NamedTuple):
    """One way to run the script."""

    name: str
    processes: int = 1
    accumulation: int = 1
    num_workers: int | None = None
    resume: bool = False


class Finding(NamedTuple):
    """The first thing in which a variant differs from its reference."""

    update: int | None  # None: in the test, or at the end
    stage: str
    what: str
    cause: str
    expected: bool = False  # not a mistake: the model looks across samples, or rounding grows


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m utils.prove", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--updates", type=int, default=6, help="how many (default: 6)")
    tolerance = "relative (default: 1e-4, with --float64 1e-9)"
    parser.add_argument("--tolerance", type=float, help=tolerance)
    double = "make models in float64 (torch's default type), to tell rounding from mistakes"
    parser.add_argument("--float64", action="store_true", help=double)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs and records")
    parser.add_argument("--precision", default="no", choices=("no", "bf16", "fp16"))
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("script", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    args.exact = any(flag.startswith("--virtual_processes") for flag in args.flags)
    if args.tolerance is None:
        args.tolerance = 1e-9 if args.float64 else 1e-4
    if not args.script.is_file():
        stop(f"there is no script {args.script}")
    if args.updates < 5:
        stop(f"--updates {args.updates} does not reach over the end of an epoch: use 5 or more")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        stop(f"--keep {args.keep} is not empty: name a new folder")
    return args


def main() -> int:
    args = parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="prove_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return prove(args, folder.resolve())
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def prove(args, folder: Path) -> int:
    import torch

    gpus = 0 if args.cpu else torch.cuda.device_count()
    base = Variant("1 process")
    accumulated = Variant("1 process, 2 accumulation steps", accumulation=2)
    workers = Variant("1 process, another number of workers", num_workers=1)
    resumed = Variant("1 process, resumed in the middle", resume=True)
    two = Variant("2 processes", processes=2)
    three = Variant("3 processes", processes=3)
    variants = [accumulated, two, three, workers]
    if args.exact:  # virtual processes decide the accumulation
        variants.remove(accumulated)
    if gpus:
        variants = [each for each in variants if each.processes <= gpus]
    show(
        f"{args.script}: {args.updates} updates of {BATCH_SIZE} samples, epochs of 4 updates, the "
        f"last of 2 samples; on {'GPUs' if gpus else 'the CPU'}"
    )
    runs = Runs(args, folder, gpus)
    with concurrent.futures.ThreadPoolExecutor(max(1, args.jobs)) as pool:
        started = {each: pool.submit(runs.launch, each) for each in [base, *variants]}
        reference = started[base].result()
        if isinstance(reference, str):
            pool.shutdown(cancel_futures=True)
            stop(f"the script fails on one process: {reference}")
        started[resumed] = pool.submit(runs.launch, resumed, base.name)
        records = {each: future.result() for each, future in started.items()}
        across = None
        if isinstance(records.get(accumulated), list):
            across = first_difference(reference, records[accumulated], args.tolerance)
        same_parts = {}
        if across is not None and across.expected:
            # Compare with one process that cuts the batch into the same parts.
            same_parts[two] = records[accumulated]
            thirds = Variant("1 process, 3 accumulation steps", accumulation=3)
            same_parts[three] = runs.launch(thirds)
            if isinstance(same_parts[three], str):
                stop(f"the script fails with 3 accumulation steps: {same_parts[three]}")
    return report(runs, reference, records, same_parts, [*variants, resumed])


def report(runs, reference, records, same_parts, variants) -> int:
    """Print a line for each variant, and the cause of what differs. Returns the exit code."""
    failed, rounded = [], []
    found = differs_in_files(reference)
    if found is None:
        show(f"  {'1 process':<38}the reference")
    else:
        show(f"  {'1 process':<38}DIFFERENT {place(found)}: {found.what}", "red")
        failed.append((None, found))
    for variant in variants:
        if variant not in records:
            continue
        if isinstance(records[variant], str):
            show(f"  {variant.name:<38}FAILS: {records[variant]}", "red")
            failed.append((variant, Finding(None, "start", records[variant], cause("fails"))))
            continue
        expected, expected_name = reference, "1 process"
        if variant in same_parts:
            expected = same_parts[variant]
            expected_name = f"1 process, {variant.processes} accumulation steps"
        exact = runs.args.exact or variant.resume or variant.num_workers
        tolerance = 0.0 if exact else runs.args.tolerance
        found = first_difference(expected, records[variant], tolerance, variant)
        if may_be_rounding(found, tolerance):
            again = variant._replace(name=f"{variant.name}, with the weights of {expected_name}")
            again = runs.launch(again, weights_of=expected_name)
            found = without_rounding(found, expected, again, tolerance, variant)
        with_parts = f" as {expected_name}" if variant in same_parts else ""
        if found is None:
            largest = largest_difference(expected, records[variant])
            said = "bit for bit the same" if largest == 0 else f"the same, to {largest:.0e}"
            show(f"  {variant.name:<38}{said}{with_parts}")
        elif found.stage == "rounding":
            show(f"  {variant.name:<38}{found.what}{with_parts}", "yellow")
            rounded.append(found.cause)
        elif found.expected and tolerance and variant not in same_parts:
            show(f"  {variant.name:<38}differs, and must: {found.cause}")
        else:
            show(f"  {variant.name:<38}DIFFERENT {place(found)}: {found.what}", "red")
            failed.append((variant, found))
    for sentence in dict.fromkeys(rounded):
        show(sentence)
    if not failed:
        show("proven: the same samples, gradients, weights and test on every topology", "green")
        return 0
    for sentence in dict.fromkeys(found.cause for _, found in failed):
        show(f"likely cause: {sentence}")
    if not runs.args.float64:
        show("if it may be rounding (BatchNorm over few samples, large numbers): --float64 tells")
    return 1


def place(found: Finding) -> str:
    if found.stage == "checkpoint":
        return "at the end, checkpoint"
    where = "test" if found.update is None else f"update {found.update}"
    return f"in {where}, {found.stage}"


class Runs:
    """Launches the variants, each in a folder of its own."""

    def __init__(self, args, folder: Path, gpus: int):
        self.args, self.folder, self.gpus = args, folder, gpus

    def launch(
        self, variant: Variant, resumed_from: str | None = None, weights_of: str | None = None
    ) -> list[dict] | str:
        """Run the script; returns the record of each rank, or why the script failed.

        resumed_from: the name of a variant that has run. weights_of: that of one whose weights
        each update begins with.
        """
        run = self._folder(variant.name)
        if resumed_from is not None:
            self._copy_as_killed(self._folder(resumed_from), run)
        run.mkdir(exist_ok=True)
        template = (CPU, CPU_DDP, SINGLE_GPU, DDP)[2 * bool(self.gpus) + (variant.processes > 1)]
        config = run.with_name(f"{run.name}.yaml")
        config.write_text(template.format(processes=variant.processes, precision=self.args.precision))
        wanted = {
            "folder": str(run),
            "updates": self.args.updates,
            "batch_size": BATCH_SIZE,
            "accumulation": variant.accumulation,
            "num_workers": variant.num_workers,
            "resume": variant.resume,
            "float64": self.args.float64,
            "weights_of": str(self._folder(weights_of)) if weights_of else None,
        }
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        if variant.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                command += ["--main_process_port", server.getsockname()[1]]
        command += [self.args.script, *self.args.flags]
        environment = {**os.environ, "TRAIN_RECORD": json.dumps(wanted)}
        environment["OMP_WAIT_POLICY"] = "PASSIVE"  # several runs share the cores
        log = run.with_name(f"{run.name}.log")
        with log.open("w") as file:
            try:
                subprocess.run(
                    list(map(str, command)),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return f"it did not end in {TIMEOUT_S} s"
        records = read(run)
        if len(records) != variant.processes:
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            errors = [line for line in lines if "rror" in line] or lines[-1:]
            return errors[0].strip() if errors else "it left no record: does it train by Run?"
        return records

    def _folder(self, name: str) -> Path:
        return self.folder / name.replace(" ", "_").replace(",", "")

    def _copy_as_killed(self, whole: Path, run: Path) -> None:
        """The folder of a run as a kill in the middle of its second epoch would have left it."""
        shutil.copytree(whole, run, ignore=shutil.ignore_patterns("summary.json", "record_*"))
        for checkpoint in (run / "checkpoints").glob("step_*"):
            if int(checkpoint.name[5:]) > 2:
                shutil.rmtree(checkpoint)


def read(run: Path) -> list[dict]:
    """The record of each rank; the first also has the "files" of the run's end, by their names."""
    import torch
    from safetensors.torch import load_file

    from ..prove.record import sampled

    ranks = [torch.load(path, weights_only=True) for path in sorted(run.glob("record_rank*.pt"))]
    if ranks:
        folders = [run, *sorted((run / "checkpoints").glob("step_*"))[-1:]]
        ranks[0]["files"] = {
            str(path.relative_to(run)): {k: sampled(v) for k, v in load_file(path).items()}
            for folder in folders
            for path in sorted(folder.glob("*.safetensors"))
        }
    return ranks


def relative(one, other) -> float:
    """Largest difference of two tensors relative to the largest entry; inf for a NaN in one."""
    if one.shape != other.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    scale = float(one.abs().max())
    difference = float((one - other).abs().max())
    if not math.isfinite(difference):
        same_nans = bool((one.isnan() == other.isnan()).all())
        return 0.0 if same_nans and not bool((one.isinf() | other.isinf()).any()) else math.inf
    return difference / scale if scale else difference


def by_item(samples: list[dict]) -> tuple[collections.Counter, dict, dict]:
    """How often each item comes; its digests; and the values by metric and item."""
    count, digests, values = collections.Counter(), {}, {}
    for part in samples:
        items = part["indices"].tolist()
        count.update(items)
        for position, item in enumerate(items):
            if part["digests"] is not None:
                digests.setdefault(item, []).append(part["digests"][position])
            for metric, numbers in part["values"].items():
                values.setdefault(metric, {}).setdefault(item, []).append(numbers[position].item())
    for found in digests.values():
        found.sort()
    for found in values.values():
        for numbers in found.values():
            numbers.sort()
    return count, digests, values


def together(ranks: list[dict], update: int) -> list[dict]:
    return [part for rank in ranks for part in rank["updates"][update]["samples"]]


def first_difference(
    reference: list[dict], ranks: list[dict], tolerance: float, variant: Variant | None = None
) -> Finding | None:
    """Compare the records of two runs in the order of training; None if they agree."""
    steps = [update["step"] for update in ranks[0]["updates"]]
    known = {update["step"]: place for place, update in enumerate(reference[0]["updates"])}
    tests = list(ranks[0]["tests"])
    for place, step in enumerate(steps):
        found = differs_in_update(reference, ranks, known[step], place, tolerance, variant)
        if found is not None:
            return found
        if tests and tests[0]["step"] == step:
            found = differs_in_test(reference, ranks, step, tolerance, variant)
            if found is not None:
                return found
            tests.pop(0)
    found = differs_in_files(ranks)
    if found is not None:
        return found
    if variant is not None and len(steps) + (2 if variant.resume else 0) < len(known):
        what = f"{len(steps)} updates were made instead of {len(known)}"
        return Finding(steps[-1] if steps else None, "updates", what, cause("updates"))
    return None


def differs_in_update(reference, ranks, at, place, tolerance, variant) -> Finding | None:
    expected, update = reference[0]["updates"][at], ranks[0]["updates"][place]
    step = update["step"]
    resumed = variant is not None and variant.resume
    count, digests, values = by_item(together(ranks, place))
    base_count, base_digests, base_values = by_item(together(reference, at))
    if count != base_count:
        return Finding(step, "samples", describe_count(count, base_count), cause("samples", resumed))
    for item, found in digests.items():
        if found != base_digests.get(item):
            what = f"item {item} has another content"
            return Finding(step, "items", what, cause("items"))
    found = differs_in_steps(reference, ranks, at, place)
    if found is not None:
        return found
    for metric in values.keys() | base_values.keys():
        if values.keys() != base_values.keys():
            what = f"{metric} is counted in one of the runs only"
            return Finding(step, "values", what, cause("updates"))
        worst = worst_value(values[metric], base_values[metric], tolerance)
        if worst is not None:
            what = f"{metric} of item {worst[0]} is {worst[1]:.6g} instead of {worst[2]:.6g}"
            why, is_expected = why_values(reference, variant)
            return Finding(step, "values", what, why, is_expected and not resumed)
    return (
        differs_in_gradients(reference, ranks, at, place, tolerance, variant, "gradients")
        or differs_in_gradients(reference, ranks, at, place, tolerance, variant, "at_step")
        or differs_in_rates(reference, ranks, at, place, step, variant)
        or differs_in_tensors(expected, update, "weights", tolerance, step, variant)
        or differs_in_tensors(expected, update, "optimizer", tolerance, step, variant)
    )


def describe_count(count, base_count) -> str:
    more = sorted((count - base_count).elements())
    missing = sorted((base_count - count).elements())
    said = []
    if more:
        said.append(f"items {', '.join(map(str, more[:5]))} come too often")
    if missing:
        said.append(f"items {', '.join(map(str, missing[:5]))} are missing")
    return " and ".join(said)


def worst_value(values, base_values, tolerance) -> tuple | None:
    """(item, value, expected value) of the item that differs most; None if none does."""
    scale = max((abs(v) for numbers in base_values.values() for v in numbers), default=0.0) or 1.0
    worst, largest = None, tolerance * scale
    for item, numbers in values.items():
        for value, expected in zip(numbers, base_values[item], strict=True):
            difference = abs(value - expected)
            if math.isnan(value) != math.isnan(expected):
                difference = math.inf
            if difference > largest:
                worst, largest = (item, value, expected), difference
    return worst


def why_values(reference, variant) -> tuple[str, bool]:
    """Why values or gradients differ while samples, items and weights are the same, and whether
    they must: the model looks across samples."""
    modules = reference[0]["modules"]
    norms = [name for name in modules if "BatchNorm" in name]
    if norms:
        return cause("batch_norm", norms[0]), True
    drops = [n for n in modules if "Dropout" in n or "DropPath" in n or "StochasticDepth" in n]
    if drops:
        return cause("dropout", drops[0]), True
    if variant is not None and variant.resume:
        return cause("not_restored"), False
    return cause("across_samples"), False


def differs_in_gradients(reference, ranks, at, place, tolerance, variant, when) -> Finding | None:
    """when: "gradients", as backward left them, or "at_step": clipped, for instance."""
    expected = reference[0]["updates"][at][when]
    update = ranks[0]["updates"][place]
    found, step = update[when], update["step"]
    stage = "gradients" if when == "gradients" else "gradients at the step"
    for name in sorted(found.keys() | expected.keys()):
        if (name in found) != (name in expected):
            what = f"{name} has a gradient in one of the runs only"
            return Finding(step, stage, what, cause("unused"))
    largest_norm = max((float(tensor[0]) for tensor in expected.values()), default=0.0)
    apart = []
    for rank, other in enumerate(ranks[1:], 1):
        for name, tensor in other["updates"][place][when].items():
            if float(tensor[0]) > ROUNDING * largest_norm and relative(found[name], tensor) > 1e-6:
                apart.append((name, rank))
    if apart:
        names = list(dict.fromkeys(name for name, _ in apart))
        what = f"{names[0]} differs between ranks 0 and {apart[0][1]}" + more_of(names)
        return Finding(step, stage, what, cause("not_reduced"))
    wrong, factors = [], []
    for name, tensor in expected.items():
        if not float(tensor[0]) > ROUNDING * largest_norm:  # zero up to rounding
            continue
        if relative(tensor, found[name]) > tolerance:
            wrong.append(name)
            factor = float((tensor[1:] @ found[name][1:]) / (tensor[1:] @ tensor[1:]))
            rest = relative(factor * tensor, found[name])
            factors.append(factor if rest < max(1e-3, tolerance) else math.nan)
    if not wrong:
        return None
    if when == "gradients" and all(math.isfinite(f) and abs(f / factors[0] - 1) < 1e-2 for f in factors):
        tail = update["step_samples"] < BATCH_SIZE
        what = f"{wrong[0]}{more_of(wrong)}: {factors[0]:.4g} times what it should be"
        return Finding(step, stage, what, cause("tail" if tail else "factor", variant))
    if when == "at_step":
        return Finding(step, stage, f"{wrong[0]}{more_of(wrong)}", cause("at_step"))
    what = f"{wrong[0]}{more_of(wrong)}: not a multiple of what it should be"
    if any(bool(found[name].isnan().any()) for name in wrong):
        return Finding(step, stage, f"{wrong[0]}{more_of(wrong)} is NaN", cause("nan"))
    why, must_differ = why_values(reference, variant)
    if must_differ and not (variant is not None and variant.resume):
        return Finding(step, stage, what, why, expected=True)
    tail = update["step_samples"] < BATCH_SIZE
    return Finding(step, stage, what, cause("tail" if tail else "gradients", variant))


def more_of(names) -> str:
    return f" and {plural(len(names) - 1, 'other')}" if len(names) > 1 else ""


def differs_in_steps(reference, ranks, at, place) -> Finding | None:
    expected = reference[0]["updates"][at]["steps"]
    for record in ranks:
        update = record["updates"][place]
        if update["steps"] != expected:
            what = f"{update['steps']} steps instead of {expected}"
            return Finding(update["step"], "optimizer steps", what, cause("steps"))
    return None


def differs_in_rates(reference, ranks, at, place, step, variant) -> Finding | None:
    expected = reference[0]["updates"][at]
    for rank, record in enumerate(ranks):
        update = record["updates"][place]
        for name, rate in update["learning_rates"].items():
            wanted = expected["learning_rates"].get(name)
            if wanted is None or abs(rate - wanted) > 1e-9 * max(abs(wanted), 1e-30):
                what = f"{name} is {rate:.6g} on rank {rank} instead of {wanted:.6g}"
                why = "schedule_not_saved" if variant and variant.resume else "schedule"
                return Finding(step, "learning rate", what, cause(why))
    return None


def differs_in_tensors(expected, update, kind, tolerance, step, variant) -> Finding | None:
    """Weights or optimizer state; entries whose gradient is zero up to rounding do not count."""
    gradients = {name.partition(": ")[2]: tensor for name, tensor in update["gradients"].items()}
    largest_norm = max((float(tensor[0]) for tensor in gradients.values()), default=0.0)
    for name, tensor in expected[kind].items():
        if name.endswith(ENDING):
            continue
        if name not in update[kind]:
            return Finding(step, kind, f"{name} is missing", cause("not_restored"))
        found = update[kind][name]
        if relative(tensor, found) <= tolerance:
            continue
        gradient = gradients.get(name.partition(": ")[2].partition("/")[0])
        if tolerance and gradient is not None and gradient.shape == tensor.shape:
            counts = gradient.abs() > 1e-3 * gradient[1:].abs().max()
            counts[0] = False
            if not float(gradient[0]) > ROUNDING * largest_norm:
                continue
            if not bool(counts.any()) or relative(tensor[counts], found[counts]) <= tolerance:
                continue
        why = kind
        if "running_" in name:
            why = "statistics"
        elif variant is not None and variant.resume:
            why = "not_restored"
        what = f"{name} differs by {relative(tensor, found):.1e} of its largest entry"
        return Finding(step, kind, what, cause(why))
    return None


def differs_in_test(reference, ranks, step, tolerance, variant) -> Finding | None:
    def of(records):
        found = [test for rank in records for test in rank["tests"] if test["step"] == step]
        samples = [part for test in found for part in test["samples"]]
        return by_item(samples), [test["result"] for test in found]

    (count, digests, values), results = of(ranks)
    (base_count, base_digests, base_values), base_results = of(reference)
    twice = [item for item, times in count.items() if times != 1]
    if twice:
        what = f"test item {twice[0]} counts {count[twice[0]]} times"
        return Finding(None, "test samples", what, cause("test_samples"))
    if count != base_count:
        return Finding(None, "test samples", describe_count(count, base_count), cause("test_samples"))
    for item, found in digests.items():
        if found != base_digests.get(item):
            return Finding(None, "test items", f"item {item} has another content", cause("items"))
    for metric, numbers in values.items():
        worst = worst_value(numbers, base_values.get(metric, {}), tolerance)
        if worst is not None:
            what = f"{metric} of item {worst[0]} is {worst[1]:.6g} instead of {worst[2]:.6g}"
            return Finding(None, "test values", what, cause("test_values"))
    for rank, result in enumerate(results):
        for metric, wanted in base_results[0].items():
            got = result.get(metric, math.nan)
            if abs(got - wanted) > max(tolerance, 1e-12) * max(abs(wanted), 1e-6):
                what = f"{metric} is {got:.6g} on rank {rank} instead of {wanted:.6g}"
                return Finding(None, "test result", what, cause("mean_of_means"))
    return None


def differs_in_files(ranks) -> Finding | None:
    """Whether the files of a run's end hold what it had after its last update, bit for bit."""
    record = ranks[0]
    last = record["updates"][-1]
    if record["unsaved"]:
        names = record["unsaved"]
        what = f"{names[0]}{more_of(names)}: trained, and not in the models given to run.start"
        return Finding(None, "checkpoint", what, cause("checkpoint"))
    checkpoint = f"checkpoints/step_{last['step']:08d}/"
    for kind, folder in (("weights", ""), ("weights", checkpoint), ("optimizer", checkpoint)):
        for name, tensor in last[kind].items():
            owner, _, key = name.partition(": ")
            file = f"{folder}{owner}.safetensors"
            held = record["files"].get(file)
            if held is None:
                what = f"there is no {file}"
                return Finding(None, "checkpoint", what, cause("checkpoint"))
            if not folder and key not in held:
                key = key.removeprefix("module.")  # a moving average: the file is of its model
            if key not in held:
                what = f"{file} has no {key}"
                return Finding(None, "checkpoint", what, cause("checkpoint"))
            if relative(tensor[1:], held[key][1:]):
                what = f"{key} in {file} differs by {relative(tensor[1:], held[key][1:]):.1e}"
                what += " of its largest entry from what the last update left"
                return Finding(None, "checkpoint", what, cause("checkpoint"))
    return None


def may_be_rounding(found: Finding | None, tolerance: float) -> bool:
    """Whether a difference may have grown from rounding. In update 1 it had no time to grow."""
    if found is None or found.expected or not tolerance:
        return False
    return found.stage in NUMBERS and found.update != 1


def without_rounding(found, reference, again, tolerance, variant) -> Finding:
    """What is left of a difference where each update begins with the weights of the reference, as
    in the records `again`: rounding cannot grow there, and a mistake is still one."""
    if isinstance(again, str):
        return found
    mistake = first_difference(reference, again, tolerance, variant)
    if mistake is not None:
        return mistake
    agree = largest_difference(reference, again)
    what = f"the same, to {agree:.0e}, in each update from the same weights"
    since = "in the test" if found.update is None else f"from update {found.update} on"
    return Finding(found.update, "rounding", what, cause("rounding", since), expected=True)


def largest_difference(reference, ranks) -> float:
    """The largest relative difference of a gradient or a weight, over all updates."""
    known = {update["step"]: update for update in reference[0]["updates"]}
    largest = 0.0
    for update in ranks[0]["updates"]:
        for kind in ("gradients", "weights"):
            for name, tensor in known[update["step"]][kind].items():
                if name in update[kind] and not name.endswith(ENDING) and tensor.numel() > 1:
                    difference = relative(tensor, update[kind][name])
                    largest = max(largest, difference)
    return largest


KINDS = {
    "samples": "the script does not take its batches from run.batches, or changes them",
    "items": "the item is drawn from a generator of its own; draw from torch's, Python's or NumPy's global generator",
    "batch_norm": "{detail} looks at all samples of a micro-batch",
    "dropout": "{detail} draws its numbers for a micro-batch; use batch.rand",
    "across_samples": "the value of a sample depends on which samples share its micro-batch, "
    "or on a random number that is drawn in the loop; use batch.rand or batch.randn",
    "not_reduced": "these parameters are not averaged over the processes: they were not passed "
    "to accelerator.prepare, or the model was called around its DDP wrapper",
    "factor": "the sum of the losses is divided, or multiplied, once too often by the number "
    "of processes, of accumulation steps or of samples; use batch.mean_loss",
    "tail": "the last, smaller update of an epoch is divided by the wrong number, or is a mean "
    "of means; use batch.mean_loss",
    "nan": "the mean over an empty micro-batch: a process may have no sample of the last update; use batch.mean_loss",
    "gradients": "a gradient is changed before it is complete (clipped or scaled in each "
    "micro-batch), or the loss depends on the parts of the batch",
    "at_step": "the gradient is clipped or scaled by a number of this process or micro-batch",
    "unused": "a parameter is used on some processes or in some micro-batches only",
    "steps": "the optimizer steps in every micro-batch, or twice: use accelerator.accumulate "
    "and the optimizer that prepare returned",
    "schedule": "the schedule steps once a process or once a micro-batch, or the learning rate "
    "is computed from the number of processes",
    "schedule_not_saved": "the schedule is not in the checkpoint: pass it to run.start",
    "weights": "the weights are changed by something else than the optimizer's step on the "
    "averaged gradient (an average of weights, a clamp, weight decay by hand)",
    "optimizer": "the optimizer's state is changed by something else than its step",
    "statistics": "the BatchNorm statistics of rank 0 alone; use BatchNorms",
    "not_restored": "something that decides the numbers is not in the checkpoint: pass it to run.start by name",
    "test_samples": "the test does not take each batch of run.test_batches once",
    "test_values": "the model looks across samples in the test: is it in evaluation mode?",
    "mean_of_means": "the result of the test is a mean of means, or of one process alone; use run.new_metrics",
    "checkpoint": "the weights change after the last update, or run.start got another model than "
    "the one that is trained, or run.finish() is missing",
    "rounding": "rounding grows over the updates, and exceeds the tolerance {detail}: no mistake",
    "fails": "see what it says; with --keep FOLDER the logs are kept",
    "updates": "the script makes another number of updates on another topology",
}


def cause(kind: str, detail=None) -> str:
    """A sentence, and where the page of causes says more."""
    sentence = KINDS[kind].format(detail=detail)
    return f"{sentence} ({CAUSES}#{kind.replace('_', '-')})"


if __name__ == "__main__":
    sys.exit(main())
