"""ResNet-50 split into stages: the weights are the unsplit model's.

    python benchmarks/model_split_exact.py

The largest difference of a weight to the unsplit model's after 20 steps of 16 images, relative to the largest weight of
its tensor: for each schedule, on 2 and 4 stages, and as two copies of a pipeline of 2. In float64 with GroupNorm, where
the unsplit model gets the whole batch at once; with `--kinds "float32, batch"` in float32 with BatchNorm, where it gets
the same micro-batches.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.model_split import run
from scripts.model_split import STAGES_PER_PROCESS

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # copies average theirs
KINDS = {"float64, group": ["--dtype", "float64", "--norm", "group"], "float32, batch": []}
# Processes, --num_stages, micro-batches.
LAYOUTS = {"2 stages": (2, 2, 4), "4 stages": (4, 4, 4), "2 x 2": (4, 2, 2)}


def parse_args():
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=common.positive_int, default=20, help="of each run (%(default)s)")
    add("--kinds", nargs="+", choices=KINDS, default=["float64, group"])
    add("--schedules", nargs="+", choices=STAGES_PER_PROCESS, default=list(STAGES_PER_PROCESS))
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    return parser.parse_args()


def measure(args) -> list[list]:
    """For each kind of numbers and schedule: the largest difference in each layout."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = work / "data"
        write_small_mnist(data)
        flags = ["--dataset", data, "--batch_size", 16, "--max_steps", args.steps]
        for kind in args.kinds:
            m = 1 if "group" in kind else 4
            how = [*KINDS[kind], "--num_microbatches", m, "--cpu_threads", 1]
            unsplit = run(work / kind, "cpu", *flags, *how)
            for schedule in args.schedules:
                differences = {}
                for layout in args.layouts:
                    processes, stages, m = LAYOUTS[layout]
                    how = ["--schedule", schedule, "--num_stages", stages, "--num_microbatches", m]
                    how += [*KINDS[kind], "--cpu_threads", 1]
                    where = work / f"{schedule}_{layout}_{kind}"
                    run(where, "cpu_ddp", *flags, *how, processes=processes)
                    differences[layout] = common.largest_difference(where, unsplit, STATISTICS)
                    print(f"{kind}, {schedule}, {layout}", file=sys.stderr, flush=True)
                results.append([kind, schedule, differences])
    return results


def write_small_mnist(folder: Path) -> None:
    """The first 320 training and 16 test images."""
    import pyarrow.parquet

    folder.mkdir()
    for split_name, rows in (("train", 320), ("test", 16)):
        file = f"{split_name}-00000-of-00001.parquet"
        part = pyarrow.parquet.read_table(common.ROOT / "data" / "mnist" / file).slice(0, rows)
        pyarrow.parquet.write_table(part, folder / file)


def report(measured) -> common.Report:
    layouts = list(measured[0][2])
    columns = {"numbers": "{}", "schedule": "{}"} | dict.fromkeys(layouts, "{:.1e}")
    rows = [[kind, schedule, *by_layout.values()] for kind, schedule, by_layout in measured]
    return common.Report([common.table(columns, rows)], [], [])


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
