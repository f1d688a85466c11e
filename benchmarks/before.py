"""The scripts of today beside the scripts of an earlier commit.

    python benchmarks/before.py HEAD~1               # about 15 minutes; with --rounds 2, about 10
    python benchmarks/before.py HEAD~5 --only mnist_epoch resnet50

Uses nothing but the scripts' command lines: any commit will do that has the same flags. Each launch runs a script
several times in the same processes and drops the first time; launches of both commits take turns. The ratio is the
ratio of the medians, below 1 where today is faster. One thread per process, except for the checkpoint.

- mnist_epoch: an epoch of MNIST at batch 64; start: `accelerate launch` to the end of an epoch, and its processor time
- ddp: an epoch of MNIST at batch 512 on two processes; virtual_processes: the same with `--virtual_processes 8`
- checkpoint: how long one of ResNet-50 blocks training
- resnet50: training steps on random images of 64 x 64 pixels, batch 32
- files: 96 JPEG files of 500 x 375 pixels to a batch of 224 x 224, as in resnet50.py
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common


class Workload(NamedTuple):
    """What a launch measures.

    Attributes:
        unit: of the value.
        run: one run in the processes of the launch; returns the value, smaller is better.
        runs: how many of a launch count.
        config: the config file of the launch.
        threads: of each process; None: as the script decides.
    """

    unit: str
    run: Callable
    runs: int
    config: str = "cpu"
    threads: int | None = 1


def epoch_s(args, *flags) -> float:
    summary, _ = common.run_script("mnist_mlp", "--dataset", args.dataset, "--num_epochs", 1, *flags)
    return common.training_s(summary)


def checkpoint_s(args) -> float:
    flags = ["--synthetic", "--batch_size", 64, "--checkpoint_every", 4, "--max_steps", 8]
    return common.run_script("resnet50", *flags)[0]["checkpoint_time_s"] / 2


def resnet50_ms(args) -> float:
    from benchmarks import resnet50

    return 1000 / resnet50.script(64, 32, args.steps)


def files_ms(args) -> float:
    from benchmarks import resnet50

    with tempfile.TemporaryDirectory() as folder:
        resnet50.write_photos(Path(folder), resnet50.photo(500, 375), 96)
        return 1000 / resnet50.decode_by_script(folder, 96)


WORKLOADS = {
    "mnist_epoch": Workload("s per epoch", lambda args: epoch_s(args, "--batch_size", 64, "--hidden", 128), 4),
    "ddp": Workload("s per epoch", lambda args: epoch_s(args, "--batch_size", 512), 4, "cpu_ddp"),
    "virtual_processes": Workload(
        "s per epoch", lambda args: epoch_s(args, "--batch_size", 512, "--virtual_processes", 8), 2, "cpu_ddp"
    ),
    "checkpoint": Workload("s per checkpoint", checkpoint_s, 2, threads=None),
    "resnet50": Workload("ms per image", resnet50_ms, 1),
    "files": Workload("ms per image", files_ms, 4),
}


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, dataset=True, worker=True)
    add = parser.add_argument
    add("commit", help="of this repository, such as HEAD~1")
    names = ["start", *WORKLOADS]
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help="%(choices)s")
    add("--runs", type=common.positive_int, help="runs of a launch that count (by workload: 1 to 4)")
    add("--steps", type=int, default=6, help="of resnet50 in a run, without the first two (%(default)s)")
    return parser.parse_args()


def worker(args) -> None:
    """In the processes of a launch: the values of all runs but the first one."""
    (name,) = args.only
    workload = WORKLOADS[name]
    with common.threads(workload.threads) if workload.threads else contextlib.nullcontext():
        values = [workload.run(args) for _ in range(1 + (args.runs or workload.runs))]
    common.finish_worker(args.worker, values[1:])


def check_out(commit: str, folder: Path) -> Path:
    """Write the files of a commit, with the benchmarks of today, to `folder`."""
    archive = subprocess.run(["git", "archive", commit], cwd=common.ROOT, check=True, capture_output=True)
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    shutil.copytree(Path(__file__).parent, folder / "benchmarks", dirs_exist_ok=True)
    return folder


def start(tree: Path, args) -> list[list[float]]:
    """Seconds from the command to its end, and of the processors."""
    began, used_s = time.perf_counter(), common.processor_time_s()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dataset", args.dataset, "--num_epochs", 1, "--output_dir", Path(folder) / "run"]
        common.launch("cpu", tree / "scripts" / "mnist_mlp.py", *flags)
    return [[time.perf_counter() - began], [common.processor_time_s() - used_s]]


def launch(tree: Path, name: str, args) -> list[list[float]]:
    flags = [args.commit, "--only", name, "--dataset", args.dataset, "--steps", args.steps]
    flags += ["--runs", args.runs] if args.runs else []
    return [common.launch_workers(WORKLOADS[name].config, tree / "benchmarks" / "before.py", *flags)]


def measure(args) -> list[list]:
    """Rows of: what, unit, all values of the earlier commit, all values of today."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": check_out(args.commit, Path(folder) / "before"), "today": common.ROOT}
        for name in args.only:
            run = start if name == "start" else lambda tree, args, name=name: launch(tree, name, args)
            ways = {way: lambda tree=tree, run=run: run(tree, args) for way, tree in trees.items()}
            print(name, file=sys.stderr, flush=True)
            launches = common.take_turns(ways, args.rounds)
            units = ["s", "s of processors"] if name == "start" else [WORKLOADS[name].unit]
            for i, unit in enumerate(units):
                both = [[value for values in launches[way] for value in values[i]] for way in trees]
                rows.append([name, unit, *both])
    return rows


def report(measured) -> common.Report:
    columns = {"what": "{}", "unit": "{}", "before": "{:.4f}", "min to max before": "{}"}
    columns |= {"today": "{:.4f}", "min to max today": "{}", "today / before": "{:.3f}"}
    rows = []
    for name, unit, *both in measured:
        before, today = common.medians(dict(enumerate(both))).values()
        ranges = [f"{min(values):.4f} to {max(values):.4f}" for values in both]
        rows.append([name, unit, before, ranges[0], today, ranges[1], today / before])
    return common.Report([common.table(columns, rows)], [], [])


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
