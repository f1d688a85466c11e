"""Shared by the benchmarks: measuring in turns, running the scripts, tables and the command line.

A benchmark has `parse_args()`; `measure(args)`, which returns JSON; and `report(measured)`, which turns it into a list
of Markdown blocks. Its docstring is its text in RESULTS.md. Code that runs in child processes is in `worker(args)`. A
benchmark with a picture has `PICTURE` and `draw(measured, device)`.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import distributed

from utils.banner import cpu_name
from utils.flags import positive_int

ROOT = Path(__file__).resolve().parents[1]


def make_parser(doc: str, rounds: int | None = None, dataset: bool = False) -> argparse.ArgumentParser:
    """A parser with --json, --worker for child processes and, if asked for, --rounds and --dataset."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=positive_int, default=rounds, help="turns of each way (%(default)s)")
    if dataset:
        default = str(ROOT / "data" / "mnist")
        parser.add_argument("--dataset", default=default, help="as in mnist_mlp.py (the bundled MNIST)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(args: argparse.Namespace, measure: Callable, report: Callable, worker: Callable | None = None) -> None:
    """Measure and print the report.

    A process started by `launch_workers` runs `worker` and ends; the main process writes what that returned.
    """
    if args.worker:
        measured = worker(args)
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            Path(args.worker).write_text(json.dumps(measured))
        sys.stdout.flush()
        # The interpreter's end would abort if a thread of gloo still frees tensors of the last collective.
        os._exit(0)
    measured = json.loads(json.dumps(measure(args)))  # as it will be read back
    if args.json:
        args.json.write_text(json.dumps(measured))
    print("\n\n".join(report(measured)))


def take_turns(ways: dict[str, Callable], rounds: int, warm_up: bool = False) -> dict[str, list]:
    """Call each way once per round, and return its results.

    The speed of a shared machine drifts by more than the ways differ, so they take turns, in reverse order in every
    second round.

    warm_up: begin with a round whose results are dropped, unless there is only one.
    """
    if warm_up and rounds > 1:
        take_turns(ways, 1)
    results = {way: [] for way in ways}
    for round in range(rounds):
        for way in list(ways)[:: -1 if round % 2 else 1]:
            results[way].append(ways[way]())
            print(f"round {round + 1} of {rounds}: {way}", file=sys.stderr, flush=True)
    return results


def table(columns: dict[str, str], rows: list) -> str:
    """A Markdown table.

    Args:
        columns: the format of the cells of each column, by the column's name.
        rows: the cells; None is an empty one.
    """
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = zip(columns.values(), row, strict=True)
        lines.append(["" if cell is None else format.format(cell) for format, cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compare(group: str, groups, unit: str, base: str, format: str) -> str:
    """A table of the ways of each group: median, range and ratio to its first way, which is called `base`.

    Args:
        group: the header of the column with the names of the groups.
        groups: pairs of a group's name and its results by way.
    """
    columns = {group: "{}", "way": "{}", f"median {unit}": format, "min": format, "max": format, f"/ {base}": "{:.2f}"}
    rows = []
    for name, values in groups:
        first = statistics.median(next(iter(values.values())))
        for way, numbers in values.items():
            median = statistics.median(numbers)
            rows.append([name, way, median, min(numbers), max(numbers), median / first])
    return table(columns, rows)


def device() -> torch.device:
    """The GPU, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@contextlib.contextmanager
def threads(count: int):
    """Let torch compute with this many threads, whatever a script asks for."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with mock.patch.object(torch, "set_num_threads"):
            yield
    finally:
        torch.set_num_threads(before)


def run_script(name: str, *flags) -> tuple[dict, list[dict]]:
    """Run `main` of a script in this process. Collective.

    A new process would take seconds to start, too long for many short runs in turns. Under the launcher, the process
    group stays for the next run. With --synthetic among the flags, resnet50.py gets random images.

    Returns:
        summary.json and the lines of metrics.jsonl; both are empty except on the main process.
    """
    script = importlib.import_module(f"scripts.{name}")
    if hasattr(script, "load_images") and not hasattr(script.load_images, "cache_info"):
        script.load_images = functools.cache(script.load_images)  # each run reads the same images, before its loop
    printed = io.StringIO()
    is_main = os.environ.get("RANK", "0") == "0"
    # The same on all processes of a launch, as FSDP needs it.
    folder = Path(tempfile.gettempdir()) / f"benchmark_{os.environ.get('MASTER_PORT', os.getpid())}"
    with contextlib.ExitStack() as stack:
        if is_main:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if "--synthetic" in flags:  # not a flag of the script
            from benchmarks import synthetic

            flags = [flag for flag in flags if flag != "--synthetic"]
            stack.enter_context(mock.patch.object(script, "load_data", synthetic.load_data))
        argv = [f"{name}.py", *map(str, flags), "--output_dir", str(folder)]
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            script.main()
        except SystemExit:
            print(printed.getvalue(), file=sys.stderr)
            raise
        gc.collect()
        if not distributed.is_initialized():
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        if not is_main:
            return {}, []
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return json.loads((folder / "summary.json").read_text()), lines


def training_s(summary: dict) -> float:
    """Seconds of a run's training loop without its checkpoints; 0 except on the main process."""
    return summary["train_time_s"] - summary["checkpoint_time_s"] if summary else 0.0


def launch(config: str, script: Path | str, *flags, launch_flags=(), timeout_s: int = 600) -> None:
    """`accelerate launch` of a script of this repository, as a user types it; prints its output only if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--main_process_port", port]
    command = [str(word) for word in (*command, *launch_flags, ROOT / script, *flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def launch_script(config: str, script: str, *flags, **options) -> tuple[dict, list[dict]]:
    """Launch a script; return its summary.json and the lines of its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        launch(config, f"scripts/{script}.py", *flags, "--output_dir", run, **options)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return json.loads((run / "summary.json").read_text()), lines


def launch_workers(config: str, file: Path | str, *flags, **options):
    """Launch `file` with --worker OUT, the flags of this process and `flags`; returns what its main process wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch(config, file, "--worker", out, *sys.argv[1:], *flags, **options)
        return json.loads(out.read_text())


def machine() -> dict[str, str]:
    """The hardware and the versions that the numbers depend on."""
    gpus, kind = "no GPU", device().type
    if kind != "cpu":
        gpus = f"{torch.accelerator.device_count()} x {torch.get_device_module(kind).get_device_name()}"
    versions = [f"{name} {version(name)}" for name in ("torch", "torchvision", "accelerate")]
    return {
        "device": f"{os.cpu_count()} cores of {cpu_name() or platform.machine()}, {gpus}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
