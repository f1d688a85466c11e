"""What the benchmarks share: ways that take turns, runs of the scripts, tables and the command line.

A benchmark has `parse_args()`; `measure(args)`, which returns JSON; and `report(measured)`, which makes a `Report` from
nothing else. Its docstring is its text in RESULTS.md. Nothing large is imported at the top: startup.py times imports.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Bars(NamedTuple):
    """A group of bars in results.png. A value is a number, or the parts it is made of, by name."""

    title: str
    values: dict[str, float | dict[str, float]]
    format: str = "{:.2f}"
    goal: float | None = None
    at_least: bool = False  # otherwise the goal is an upper limit
    ours: int = 1  # how many of the bars are ours, from the first on

    def is_stacked(self) -> bool:
        return isinstance(next(iter(self.values.values())), dict)


class Goal(NamedTuple):
    what: str
    measured: float
    limit: float
    format: str = "{:.2f}"
    at_least: bool = False  # otherwise the limit is an upper one

    def is_met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class Report(NamedTuple):
    tables: list[str]
    bars: list[Bars]
    goals: list[Goal]


def positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def make_parser(
    doc: str, rounds: int | None = None, dataset: bool = False, worker: bool = False
) -> argparse.ArgumentParser:
    """A parser with --json and what is asked for: --rounds, --dataset, and --worker for what a benchmark launches."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=positive_int, default=rounds, help="turns of each way (%(default)s)")
    if dataset:
        default = str(ROOT / "data" / "mnist")
        parser.add_argument("--dataset", default=default, help="as in mnist_mlp.py (the bundled MNIST)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    if worker:
        parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def check_names(parser: argparse.ArgumentParser, kind: str, names: list[str], known) -> None:
    """argparse's `choices` do not work with nargs="*" and a default of several."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"there is no {kind} {', '.join(unknown)}; there are {', '.join(known)}")


def main(args: argparse.Namespace, measure: Callable, report: Callable) -> None:
    """Measure and print the tables."""
    measured = json.loads(json.dumps(measure(args)))  # as it will be read back
    if args.json:
        args.json.write_text(json.dumps(measured))
    print("\n\n".join(report(measured).tables))


def take_turns(ways: dict[str, Callable], rounds: int) -> dict[str, list]:
    """What each way returns in each round.

    The speed of a shared machine drifts by more than the ways differ, so they take turns, in reverse order in every
    second round.
    """
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


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(each) for way, each in values.items()}


def compare(values: dict[str, list[float]], unit: str, base: str, format: str, **more: Callable) -> str:
    """A table of the ways: median, range and ratio to `base`; more: columns computed from the median."""
    columns = {"way": "{}", f"median {unit}": format, "min": format, "max": format, f"/ {base}": "{:.2f}"}
    middles, rows = medians(values), []
    for way, each in values.items():
        others = [column(middles[way]) for column in more.values()]
        rows.append([way, middles[way], min(each), max(each), middles[way] / middles[base], *others])
    return table(columns | dict.fromkeys(more, "{:,.0f}"), rows)


def device():
    """The GPU, or else the CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@contextlib.contextmanager
def threads(count: int):
    """Let torch compute with this many threads, whatever a script asks for."""
    from unittest import mock

    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with mock.patch.object(torch, "set_num_threads"):
            yield
    finally:
        torch.set_num_threads(before)


def run_script(name: str, *flags) -> tuple[dict, list[dict]]:
    """Run `main` of a script in this process. Collective.

    Without the seconds that a process takes to start, many short runs can take turns with what they are compared with.
    Under the launcher, the process group stays for the next run. Uses nothing but the script's command line and the
    files of a run: before.py runs the scripts of earlier commits with it.

    Returns:
        summary.json and the lines of metrics.jsonl; both are empty on other processes than the main one.
    """
    from unittest import mock

    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    script = importlib.import_module(f"scripts.{name}")
    if hasattr(script, "load_images") and not hasattr(script.load_images, "cache_info"):
        script.load_images = functools.cache(script.load_images)  # each run reads the same images, before its loop
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        argv = [f"{name}.py", *map(str, flags), "--output_dir", str(folder)]
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(Accelerator, "end_training"))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            script.main()
        except SystemExit:
            print(printed.getvalue(), file=sys.stderr)
            raise
        gc.collect()
        if not torch.distributed.is_initialized():
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        if not (folder / "summary.json").exists():  # not the main process
            return {}, []
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return json.loads((folder / "summary.json").read_text()), lines


def training_s(summary: dict) -> float:
    """Seconds of a run's training loop without its checkpoints; 0 on other processes than the main one."""
    return summary["train_time_s"] - summary["checkpoint_time_s"] if summary else 0.0


def launch(config: str, script: Path | str, *flags, launch_flags=(), timeout_s: float = 600) -> None:
    """`accelerate launch` of a script, as a user types it; prints its output only if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config_file = ROOT / "accelerate_configs" / f"{config}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config_file]
    command += ["--main_process_port", port, *launch_flags]
    command = [str(word) for word in (*command, script, *flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def launch_workers(config: str, file: Path | str, *flags, **options):
    """Launch `file` with --worker OUT and `flags`; returns what its main process wrote to OUT."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch(config, file, "--worker", out, *flags, **options)
        return json.loads(out.read_text())


def finish_worker(out: str, measured) -> None:
    """At the end of each process that `launch_workers` launched: the main one writes to `out`."""
    from torch import distributed

    is_group = distributed.is_initialized()
    if not is_group or distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(measured))
    if is_group:
        distributed.destroy_process_group()


def largest_difference(run: Path, reference: Path, without: tuple[str, ...] = ()) -> float:
    """The largest difference of a weight of two runs, relative to the largest weight of its tensor in `reference`.

    Args:
        run, reference: folders of the runs.
        without: how the names of tensors end that are not compared.
    """
    from safetensors.torch import load_file

    weights, expected = (load_file(folder / "model.safetensors") for folder in (run, reference))
    differences = [0.0]
    for name in expected:
        if not name.endswith(without):
            difference = (weights[name].double() - expected[name].double()).abs().max()
            # Of equal tensors this is 0, also if all entries are 0.
            differences.append((difference / expected[name].double().abs().max()).nan_to_num(0.0).item())
    return max(differences)


def write_idx(folder: Path, dataset: str) -> None:
    """Write MNIST as the files that torchvision reads."""
    import gzip

    import torch

    from utils.datasets.images_in_memory import load_images

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, split in zip(("train", "t10k"), load_images(dataset), strict=True):
        (images, labels), count = split.tensors, len(split)
        for name, kind, sizes, tensor in (
            ("images-idx3-ubyte", 3, (count, 28, 28), images),
            ("labels-idx1-ubyte", 1, (count,), labels.to(torch.uint8)),
        ):
            header = bytes([0, 0, 8, kind]) + b"".join(size.to_bytes(4, "big") for size in sizes)
            content = header + tensor.numpy().tobytes()
            (raw / f"{prefix}-{name}").write_bytes(content)
            (raw / f"{prefix}-{name}.gz").write_bytes(gzip.compress(content, 0))


def processor_time_s() -> float:
    """Seconds of all child processes that have ended, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def machine() -> dict[str, str]:
    """What the numbers depend on, in words."""
    import platform
    from importlib.metadata import version

    import torch

    from utils.extras.banner import cpu_name

    gpus, kind = "no GPU", device().type
    if kind != "cpu":
        gpus = f"{torch.accelerator.device_count()} x {torch.get_device_module(kind).get_device_name()}"
    versions = [f"{name} {version(name)}" for name in ("torch", "torchvision", "accelerate")]
    return {
        "device": f"{os.cpu_count()} cores of {cpu_name() or platform.machine()}, {gpus}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "date": time.strftime("%Y-%m-%d"),
    }
