"""Prove that a script trains the same model on any topology, or name the first thing that differs.

    python -m utils.prove train.py [flags of the script]
    python -m utils.prove --resume_flags "--resume last.pt" train.py --lr 0.1
    python -m utils.prove --steps 12 --keep proof/ mine.py --lr 0.1

Any script that trains with Accelerate or with torch.distributed, unchanged: `any_script.py` runs it for a few steps on
one process and on several, with the same samples per step, and compares in the order in which things happen.

A script that trains through `Run` and `GlobalLoader` is looked at more closely: on one process, with accumulation, on
several processes, with a different number of data workers, and with a resume in the middle; samples, items, values of
each sample, gradients, learning rates, weights, optimizer state, test, files. With its flag --virtual_processes 6, all
must agree bit for bit.

Ends with 0 if all agree, 1 if something is wrong, 2 if the script fails, 3 if this cannot tell.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ..console import show, stop
from ..flags import non_negative_float, positive_int
from .causes import cause
from .first_difference import NUMBERS, RESUMED_AFTER, Comparison, Finding, differs_in_files, largest_difference

BATCH_SIZE = 12  # divides by 1, 2 and 3 processes, and by 2 accumulation steps on each
TIMEOUT_S = 600
TOLERANCE, TOLERANCE_FLOAT64 = 1e-4, 1e-9


class Variant(NamedTuple):
    """One way to run the script."""

    name: str
    processes: int = 1
    accumulation: int = 1
    num_workers: int | None = None
    resume: bool = False

    @property
    def must_be_exact(self) -> bool:
        return self.resume or self.num_workers is not None


REFERENCE = Variant("1 process")
ACCUMULATED = Variant("1 process, 2 accumulation steps", accumulation=2)
ACCUMULATED_3 = Variant("1 process, 3 accumulation steps", accumulation=3)
TWO = Variant("2 processes", processes=2)
THREE = Variant("3 processes", processes=3)
WORKERS = Variant("1 process, another number of workers", num_workers=1)
RESUMED = Variant("1 process, resumed in the middle", resume=True)


def parse_args():
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=positive_int, default=6, metavar="N", help="optimizer steps of each run (default: 6)")
    defaults = f"default: {TOLERANCE:g}, with --float64 {TOLERANCE_FLOAT64:g}"
    add("--tolerance", type=non_negative_float, metavar="X", help=f"largest relative difference ({defaults})")
    add("--float64", action="store_true", help="make models in float64, to tell rounding from mistakes")
    add("--keep", type=Path, metavar="FOLDER", help="keep the runs and records")
    any_script = "of a script with a loop of its own"
    add("--processes", type=process_counts, default=(2, 3), metavar="N,N", help=f"{any_script} (default: 2,3)")
    add("--resume_flags", metavar="FLAGS", help=f'{any_script}: with which it resumes, "" if it does so by itself')
    add("--timeout_s", type=non_negative_float, default=60, metavar="X", help=f"per run, {any_script} (default: 60)")
    add("--json", action="store_true", help=f"the report as JSON, {any_script}")
    add("--picture", type=Path, metavar="FILE", help=f"draw who read which sample (.png, .svg, .pdf), {any_script}")
    add("--precision", default="no", choices=("no", "bf16", "fp16"))
    add("--cpu", action="store_true", help="leave GPUs alone")
    add("--jobs", type=positive_int, default=2, metavar="N", help="runs at a time (default: 2)")
    own_flags = {flag for action in parser._actions for flag in action.option_strings}
    add("script", type=Path)
    add("flags", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args()
    args.exact = any(flag.startswith("--virtual_processes") for flag in args.flags)
    if args.tolerance is None:
        args.tolerance = TOLERANCE_FLOAT64 if args.float64 else TOLERANCE
    if not args.script.is_file():
        stop(f"there is no script {args.script}")
    text = args.script.read_text(errors="replace")
    for flag in args.flags:
        name = flag.partition("=")[0]
        if name in own_flags and name not in text:
            stop(f"{name} is a flag of prove and not of {args.script}: write it before the script")
    if args.steps < 5:
        stop(f"--steps {args.steps} does not reach over the end of an epoch: use 5 or more")
    if args.keep and args.keep.exists() and not (args.keep.is_dir() and not any(args.keep.iterdir())):
        stop(f"--keep {args.keep} is not an empty folder: name a new one")
    if args.picture:
        from .picture import ENDINGS

        if args.picture.suffix not in ENDINGS or args.picture.is_dir():
            stop(f"--picture {args.picture} is not a file that ends in {', '.join(ENDINGS)}")
        if not os.access(args.picture.absolute().parent, os.W_OK):
            stop(f"--picture {args.picture}: its folder does not exist or cannot be written to")
    return args


def main() -> int:
    args = parse_args()
    if not trains_through_run(args.script):
        from . import any_script

        return any_script.prove(args)
    if args.picture or args.json:
        stop(f"--picture and --json are for a script with a loop of its own, and {args.script} trains through Run")
    configs = find_configs(args.script)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="prove_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return prove(args, Launches(args, folder.resolve(), configs))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def process_counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of processes, larger than one, with commas between them."""
    counts = tuple(sorted({int(part) for part in text.split(",")}))
    if counts[0] < 2:
        raise ValueError(text)
    return counts


def trains_through_run(script: Path) -> bool:
    """Whether a script imports GlobalLoader, or Run, of the package beside this one, by any name."""
    tree = ast.parse(script.read_bytes())
    names = {
        (node.module or "").rpartition(".")[2] + "." + name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    return bool(names & {"loader.GlobalLoader", "run.Run"})


def find_configs(script: Path) -> Path:
    """The folder accelerate_configs beside this package, the script, or the script's folder."""
    places = [Path(__file__).resolve().parents[2], *script.resolve().parents[:2]]
    for place in places:
        if (place / "accelerate_configs" / "cpu_ddp.yaml").is_file():
            return place / "accelerate_configs"
    stop(f"there is no folder accelerate_configs with cpu.yaml and cpu_ddp.yaml in {places[0]} or {places[1]}: copy it")


def prove(args, launches: "Launches") -> int:
    """Run all variants and report. Returns the exit code.

    Args:
        launches: runs a variant; see `Launches`.
    """
    variants = [ACCUMULATED, TWO, THREE, WORKERS]
    if args.exact:  # virtual processes decide the accumulation
        variants.remove(ACCUMULATED)
    if launches.gpus:
        variants = [variant for variant in variants if variant.processes <= launches.gpus]
    show(
        f"{args.script}: {args.steps} steps of {BATCH_SIZE} samples, epochs of 4 steps, the last of 2 samples; on "
        f"{'GPUs' if launches.gpus else 'the CPU'}"
    )
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        started = {variant: pool.submit(launches.run, variant) for variant in [REFERENCE, *variants]}
        reference = started[REFERENCE].result()
        if isinstance(reference, str):
            pool.shutdown(cancel_futures=True)
            stop(f"the script fails on one process: {reference}")
        started[RESUMED] = pool.submit(launches.run, RESUMED)
        records = {variant: future.result() for variant, future in started.items()}
    return Report(args, launches, records).show()


class Report:
    """Says of each variant whether it agrees, and of what differs the likely cause.

    Args:
        launches: runs what is needed to tell a mistake from what must differ.
        records: of each variant in the order to show; a sentence where the script failed.
    """

    def __init__(self, args, launches, records: dict[Variant, list[dict] | str]):
        self.args, self.launches, self.records = args, launches, records
        self.mistakes, self.notes = [], []
        # Where a model looks across samples, several processes are compared with one that cuts the batch alike.
        self.same_parts = {}
        accumulated = records.get(ACCUMULATED)
        if isinstance(accumulated, list):
            found = Comparison(records[REFERENCE], accumulated, args.tolerance).first_difference()
            if found is not None and found.expected:
                self.same_parts = {TWO: ACCUMULATED, THREE: ACCUMULATED_3}

    def show(self) -> int:
        """Print a line for each variant, and the causes. Returns the exit code."""
        found = next(differs_in_files(self.records[REFERENCE][0]), None)
        self._line(REFERENCE, found, "the reference")
        for variant, ranks in self.records.items():
            if isinstance(ranks, str):
                self._print(variant, f"FAILS: {ranks}", "red")
                self.mistakes.append(cause("fails"))
            elif variant is not REFERENCE:
                self._compare(variant, ranks)
        for sentence in dict.fromkeys(self.notes):
            show(sentence)
        if not self.mistakes:
            show("proven: the same samples, gradients, weights and test on every topology", "green")
            return 0
        for sentence in dict.fromkeys(self.mistakes):
            show(f"likely cause: {sentence}")
        if not self.args.float64:
            show("if it may be rounding (BatchNorm over few samples, large numbers): --float64 tells")
        return 1

    def _compare(self, variant: Variant, ranks: list[dict]) -> None:
        base = self.same_parts.get(variant, REFERENCE)
        if base not in self.records:
            self.records = self.records | {base: self.launches.run(base)}
            if isinstance(self.records[base], str):
                stop(f"the script fails with {base.accumulation} accumulation steps: {self.records[base]}")
        reference = self.records[base]
        exact = self.args.exact or variant.must_be_exact
        tolerance = 0.0 if exact else self.args.tolerance
        options = {"resumed": variant.resume, "same_parts": base is not REFERENCE}
        found = Comparison(reference, ranks, tolerance, **options).first_difference()
        # In the first step rounding had no time to grow.
        if found is not None and not found.expected and not exact and found.stage in NUMBERS and found.step != 1:
            again = self.launches.run(variant, weights_of=base)
            if isinstance(again, list):
                mistake = Comparison(reference, again, tolerance, **options).first_difference()
                found = mistake or rounding(found, largest_difference(reference, again))
        largest = largest_difference(reference, ranks)
        same = "bit for bit the same" if largest == 0 else f"the same, to {largest:.0e}"
        self._line(variant, found, same, f" as {base.name}" if base is not REFERENCE else "")

    def _line(self, variant: Variant, found: Finding | None, same: str, compared_with: str = "") -> None:
        if found is None:
            self._print(variant, same + compared_with)
        elif found.stage == "rounding":
            self._print(variant, found.what + compared_with, "yellow")
            self.notes.append(found.cause)
        elif found.expected:
            self._print(variant, f"differs, and must: {found.cause}")
        else:
            self._print(variant, f"DIFFERENT {found.place}: {found.what}", "red")
            self.mistakes.append(found.cause)

    def _print(self, variant: Variant, text: str, colour: str = "") -> None:
        show(f"  {variant.name:<38}{text}", colour)


def rounding(found: Finding, agree: float) -> Finding:
    """What to say of a difference that is gone where each step begins with the weights of the reference: rounding
    cannot grow there, and a mistake would still be one."""
    since = "in the test" if found.step is None else f"from step {found.step} on"
    what = f"the same, to {agree:.0e}, in each step from the same weights"
    return Finding(found.step, "rounding", what, cause("rounding", since), expected=True)


class Launches:
    """Launches the variants, each in a folder of its own.

    Args:
        configs: the folder accelerate_configs.
    """

    def __init__(self, args, folder: Path, configs: Path):
        import torch

        self.args, self.folder, self.configs = args, folder, configs
        self.gpus = 0 if args.cpu else torch.cuda.device_count()

    def run(self, variant: Variant, weights_of: Variant | None = None) -> list[dict] | str:
        """Run the script; returns the record of each rank, or why the script failed.

        Args:
            weights_of: a variant that has run, and with whose weights each step begins.
        """
        name = variant.name if weights_of is None else f"{variant.name}, with the weights of {weights_of.name}"
        run = self._folder(name)
        if variant.resume:
            self._copy_as_killed(self._folder(REFERENCE.name), run)
        run.mkdir(exist_ok=True)
        settings = {
            "folder": str(run),
            "steps": self.args.steps,
            "batch_size": BATCH_SIZE,
            "accumulation": variant.accumulation,
            "num_workers": variant.num_workers,
            "resume": variant.resume,
            "float64": self.args.float64,
            "weights_of": weights_of and str(self._folder(weights_of.name)),
        }
        file = run.with_name(f"{run.name}.json")
        file.write_text(json.dumps(settings))
        log = run.with_name(f"{run.name}.log")
        code = self._launch(variant, file, log)
        if code is None:
            return f"it did not end in {TIMEOUT_S} s"
        if code == 0:
            records = read_records(run)
            if len(records) == variant.processes:
                return records
            return f"{len(records)} of {variant.processes} processes left a record: does it train by Run, to the end?"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror: " in line] or lines[-1:]
        return errors[0].strip() if errors else f"exit code {code}"

    def _launch(self, variant: Variant, settings: Path, log: Path) -> int | None:
        """Returns the exit code; None if the script did not end in time."""
        config = (("cpu", "cpu_ddp"), ("single_gpu", "ddp"))[bool(self.gpus)][variant.processes > 1]
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", self.configs / f"{config}.yaml", "--mixed_precision", self.args.precision]
        if variant.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                command += ["--num_processes", variant.processes, "--main_process_port", server.getsockname()[1]]
        command += ["-m", f"{__package__}.worker", settings, self.args.script, *self.args.flags]
        # Several runs share the cores.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        with log.open("w") as file:
            process = subprocess.Popen(
                list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            try:
                return process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end_with_children(process)
                return None

    def _folder(self, name: str) -> Path:
        return self.folder / name.replace(" ", "_").replace(",", "")

    def _copy_as_killed(self, whole: Path, run: Path) -> None:
        """The folder of a run as a kill in the middle of its first epoch would have left it."""
        shutil.copytree(whole, run, ignore=shutil.ignore_patterns("summary.json", "record_*"))
        for checkpoint in (run / "checkpoints").glob("step_*"):
            if int(checkpoint.name[5:]) > RESUMED_AFTER:
                shutil.rmtree(checkpoint)


def end_with_children(process: subprocess.Popen) -> None:
    import psutil

    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def read_records(run: Path) -> list[dict]:
    """The record of each rank; the first also has the "files" of the run's end, by their names."""
    import torch
    from safetensors.torch import load_file

    from .tensors import sampled

    ranks = [torch.load(path, weights_only=True) for path in sorted(run.glob("record_rank*.pt"))]
    if ranks:
        folders = [run, *sorted((run / "checkpoints").glob("step_*"))[-1:]]
        ranks[0]["files"] = {
            str(path.relative_to(run)): {name: sampled(tensor) for name, tensor in load_file(path).items()}
            for folder in folders
            for path in sorted(folder.glob("*.safetensors"))
        }
    return ranks
