"""Gradients of micro-batches against the whole batch's.

    python benchmarks/gradient_accumulation.py

1069 images of MNIST, batch size 128: 8 steps and a last one of 45 images. For k micro-batches on
P processes, the largest relative difference of the gradient to that of the whole batch at once: in
the full steps of the epoch, and in the last one.

- ours: scripts/gradient_accumulation.py, unchanged, with --compare
- naive: `loss = criterion(...) / k; backward(); if (i + 1) % k == 0 or last: step()` with a mean as
  criterion, a prepared DataLoader and DDP, unchanged

All-reduces are those of gradients, counted in DDP's communication hook. Then BatchNorm against
LayerNorm, on one process in float64, and memory: the peak of two steps of 16384 images above what
the process had before them.
"""

import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts.gradient_accumulation import (
    CellNet,
    count_all_reduces,
    count_ink_cells,
    gradient_difference,
    losses_and_predictions,
)
from utils.console import plural
from utils.datasets.images_in_memory import BUNDLED_MNIST, load_images
from utils.sampler import GlobalSampler

NUM_IMAGES, BATCH, MEMORY_BATCH = 1069, 128, 16384
CONFIGS = {1: "cpu", 2: "cpu_ddp"}
DTYPES = ("float64", "float32")


def parse_args():
    parser = common.make_parser(__doc__)
    steps = {"type": int, "default": [1, 2, 4, 8]}
    parser.add_argument("--steps", nargs="+", help="accumulation steps (k)", **steps)
    parser.add_argument("--memory_steps", nargs="*", help="the same, for memory", **steps)
    parser.add_argument("--worker", help="for the processes that it launches: where to write")
    parser.add_argument("--flags", help="for the processes that it launches: those of one run")
    parser.add_argument("--dataset", help="for the processes that it launches")
    return parser.parse_args()


def naive(data, variable_length: bool, dtype: str, k: int) -> tuple[list[float], int]:
    """The loop of blog posts: the differences of all steps, and the all-reduces."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, Subset

    accelerator = Accelerator(cpu=True)
    order, _ = GlobalSampler(len(data), BATCH, seed=0).items(epoch=0)
    torch.manual_seed(0)
    model = CellNet(1, 10, "none", variable_length).to(getattr(torch, dtype))
    loader = DataLoader(Subset(data, order.tolist()), BATCH // k // accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts, differences = count_all_reduces(model, 0), []
    for i, (images, labels) in enumerate(loader):
        losses, _ = losses_and_predictions(model, images, labels)
        weights = torch.ones_like(losses)
        if variable_length:
            weights = count_ink_cells([images, labels])
        mean = (losses * weights).sum() / weights.sum()
        accelerator.backward(mean / k)
        if (i + 1) % k == 0 or i + 1 == len(loader):
            first = len(differences) * BATCH
            whole_batch = data[order[first : first + BATCH]]
            bare = accelerator.unwrap_model(model)
            norm = nn.utils.clip_grad_norm_(bare.parameters(), math.inf)
            differences.append(gradient_difference(bare, norm, *whole_batch, math.inf))
            optimizer.step()
            optimizer.zero_grad()
    return differences, counts["gradient_all_reduces"]


def ours(*flags) -> tuple[list[float], int]:
    """The same of one run of the script."""
    summary, lines = common.run_script("gradient_accumulation", *flags)
    differences = [line["gradient_difference"] for line in lines if line["split"] == "compare"]
    return differences, summary.get("gradient_all_reduces", 0)


def worker(args) -> None:
    """On the processes of this launch: one run with `flags`, or all runs that are compared."""
    if args.flags:
        result, _ = common.run_script("gradient_accumulation", *args.flags.split())
    else:
        result, (data, _) = {"gradients": [], "norms": {}}, load_images(args.dataset)
        flags = ["--dataset", args.dataset, "--batch_size", BATCH, "--num_epochs", 1, "--compare"]
        for variable_length in (False, True):
            for k in args.steps:
                for dtype in DTYPES:
                    extra = ["--gradient_accumulation_steps", k, "--dtype", dtype]
                    row = {"variable_length": variable_length, "k": k, "dtype": dtype}
                    row["ours"] = ours(*flags, *extra, *["--variable_length"] * variable_length)
                    row["naive"] = naive(data, variable_length, dtype, k)
                    result["gradients"].append(row)
        if not torch.distributed.is_initialized():
            for norm in ("batch", "layer"):
                extra = ["--dtype", "float64", "--norm", norm, "--gradient_accumulation_steps"]
                result["norms"][norm] = {k: max(ours(*flags, *extra, k)[0]) for k in (1, 4)}
    common.finish_worker(args.worker, result)


def measure(args) -> dict:
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        for split, rows in (("train", NUM_IMAGES), ("test", 101)):
            name = f"{split}-00000-of-00001.parquet"
            part = pyarrow.parquet.read_table(f"{BUNDLED_MNIST}/{name}").slice(0, rows)
            pyarrow.parquet.write_table(part, Path(folder) / name)
        flags = ["--dataset", folder, "--steps", *args.steps]
        measured = {}
        for processes, config in CONFIGS.items():
            measured[processes] = common.launch_workers(config, __file__, *flags)
    memory = []
    for processes, config in CONFIGS.items():
        for k in args.memory_steps:
            flags = f"--batch_size {MEMORY_BATCH} --max_steps 2 --gradient_accumulation_steps {k}"
            summary = common.launch_workers(config, __file__, f"--flags={flags}")
            names = ("train_peak_memory_gib", "above_start_gib", "samples_per_s")
            memory.append([processes, k, *(summary[name] for name in names)])
    return {"by_processes": measured, "memory": memory}


def report(measured) -> common.Report:
    columns = {"P": "{}", "k": "{}"}
    for who in ("ours", "naive"):
        columns |= {f"{who} {dtype}{last}": "{:.1e}" for dtype in DTYPES for last in ("", ", last")}
        columns[f"{who}, all-reduces"] = "{}"
    rows = {False: {}, True: {}}
    for processes, results in measured["by_processes"].items():
        for each in results["gradients"]:
            key = processes, each["k"]
            row = rows[each["variable_length"]].setdefault(key, {"ours": [], "naive": []})
            for who, cells in row.items():
                differences, reduces = each[who]
                # Of both types; the number of all-reduces is the same.
                cells[2:] = [max(differences[:-1]), differences[-1], reduces]
    titles = {False: "One term a sample", True: "Terms differ by sample (`--variable_length`)"}
    tables = []
    for kind, title in titles.items():
        cells = [[*key, *row["ours"], *row["naive"]] for key, row in rows[kind].items()]
        tables.append(f"{title}:\n\n{common.table(columns, cells)}")
    norms = measured["by_processes"]["1"]["norms"]
    cells = [[norm, by_k["1"], by_k["4"]] for norm, by_k in norms.items()]
    columns = {"norm": "{}", "k = 1": "{:.1e}", "k = 4": "{:.1e}"}
    tables.append(f"Norms:\n\n{common.table(columns, cells)}")
    if not measured["memory"]:
        return common.Report(tables, [], [])
    columns = {"P": "{}", "k": "{}", "peak, GiB": "{:.2f}", "above the start, GiB": "{:.2f}"}
    columns["images/s"] = "{:,.0f}"
    tables.append(f"Memory of a process:\n\n{common.table(columns, measured['memory'])}")
    above = {f"{plural(p, 'process')}, k = {k}": gib for p, k, _, gib, _ in measured["memory"]}
    title = f"Accumulation, batch {MEMORY_BATCH}: GiB of a process"
    return common.Report(tables, [common.Bars(title, above, ours=len(above))], [])


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
