"""Gradients of micro-batches against the whole batch's.

    python benchmarks/gradient_accumulation.py

1069 images of MNIST, batch size 128: 8 steps and a last one of 45 images. For k micro-batches on
P processes, the largest relative difference of the gradient to that of the whole batch at once: in
the full steps of the epoch, and in the last one.

- ours: scripts/gradient_accumulation.py, unchanged
- naive: `loss = criterion(...) / k; backward(); if (i + 1) % k == 0 or last: step()` with a mean as
  criterion, a prepared DataLoader and DDP, unchanged

All-reduces are those of gradients, counted in DDP's communication hook. Then BatchNorm against
LayerNorm, on one process in float64, and memory: the peak of two steps of 16384 images above what
the process had before them.
"""

import contextlib
import copy
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import gradient_accumulation as script
from scripts.gradient_accumulation import CellNet, count_ink_cells, losses_and_predictions
from utils.console import plural
from utils.datasets.images_in_memory import load_images
from utils.extras.peak_memory import peak_memory_gib, reset_peak_memory
from utils.run import Run
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


def count_all_reduces(model) -> Counter:
    """A Counter whose "gradient_all_reduces" grows with each all-reduce of gradients.

    DDP calls the hook for each bucket of gradients that it sends, in place of its own all-reduce.
    """
    counts = Counter()

    def counting_hook(process_group, bucket):
        counts["gradient_all_reduces"] += 1
        return allreduce_hook(process_group, bucket)

    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, counting_hook)
    return counts


def gradient_difference(model, norm, images, labels, max_grad_norm: float) -> float:
    """The relative difference of `model`'s gradient to the gradient of the whole batch.

    The whole batch is one micro-batch in one process, by plain autograd: without accumulation, DDP and Accelerate.

    Args:
        model: the bare model, with its gradient after clipping.
        norm: the norm of that gradient before clipping.
        images, labels: all samples of the step.

    Returns:
        The largest difference of an entry, over the largest entry; or the relative difference of
        the norms before clipping, if that is larger: clipping would hide a wrong factor.
    """
    # A copy has no gradients, and leaves BatchNorm's statistics in the model as they are.
    whole = copy.deepcopy(model)
    losses, _ = losses_and_predictions(whole, images, labels)
    weights = torch.ones_like(losses)
    if whole.variable_length:
        weights = count_ink_cells([images, labels])
    ((losses * weights).sum() / weights.sum().clamp(min=1)).backward()
    whole_norm = nn.utils.clip_grad_norm_(whole.parameters(), max_grad_norm)
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    difference = float((ours - expected).abs().max() / expected.abs().max())
    return max(difference, abs(float(norm / whole_norm) - 1))


class Measured:
    """What is measured around one run of the script, which stays as it is.

    differences: of the gradient of each step to that of the whole batch, if `compare`, which takes the memory of that.
    counts: all-reduces of gradients.
    peak_gib, above_start_gib: peak memory of a process in training.
    """

    def __init__(self, compare: bool = False):
        self.compare = compare
        self.differences, self.counts, self.peak_gib, self.above_start_gib = [], Counter(), 0.0, 0.0

    def run(self, *flags) -> dict:
        """Run the script's main in this process; its summary.json. Collective."""
        start, clip, evaluate = Run.start, Accelerator.clip_grad_norm_, script.evaluate

        def start_and_look(run, train_loader, *args, checkpoint, **options):
            start(run, train_loader, *args, checkpoint=checkpoint, **options)
            self.step, self.loader, self.model = run.step, train_loader, checkpoint["model"]
            self.counts = count_all_reduces(self.model)
            reset_peak_memory(run.accelerator.device)
            self.start_gib = peak_memory_gib(run.accelerator)

        def clip_and_compare(accelerator, parameters, max_grad_norm):
            norm = clip(accelerator, parameters, max_grad_norm)
            if self.compare:
                images, labels = samples_of_step(self.loader, self.step)
                bare = accelerator.unwrap_model(self.model)
                self.differences.append(gradient_difference(bare, norm, images, labels, max_grad_norm))
            self.step += 1
            return norm

        def measure_and_evaluate(model, loader, run):
            self.peak_gib = max(self.peak_gib, peak_memory_gib(run.accelerator))
            self.above_start_gib = self.peak_gib - self.start_gib
            return evaluate(model, loader, run)

        with (
            mock.patch.object(Run, "start", start_and_look),
            mock.patch.object(Accelerator, "clip_grad_norm_", clip_and_compare),
            mock.patch.object(script, "evaluate", measure_and_evaluate),
        ):
            summary, _ = common.run_script("gradient_accumulation", *flags)
        return summary


def samples_of_step(loader, step: int) -> list[torch.Tensor]:
    """Images and labels of the step that follows on `step` steps, of all processes together."""
    epoch, step = divmod(step, len(loader))
    first = step * loader.sampler.batch_size
    indices, _ = loader.sampler.items(epoch, first, first + loader.sampler.batch_size)
    return [tensor[indices.to(tensor.device)] for tensor in loader.tensors]


@contextlib.contextmanager
def default_dtype(name: str):
    """Make models in this type."""
    torch.set_default_dtype(getattr(torch, name))
    yield
    torch.set_default_dtype(torch.float32)


def naive(data, variable_length: bool, dtype: str, k: int) -> tuple[list[float], int]:
    """The loop of blog posts: the differences of all steps, and the all-reduces."""
    from torch.utils.data import DataLoader, Subset

    accelerator = Accelerator(cpu=True)
    order, _ = GlobalSampler(len(data), BATCH, seed=0).items(epoch=0)
    torch.manual_seed(0)
    model = CellNet(1, 10, "none", variable_length).to(getattr(torch, dtype))
    loader = DataLoader(Subset(data, order.tolist()), BATCH // k // accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counts, differences = count_all_reduces(model), []
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


def ours(dtype: str, *flags) -> tuple[list[float], int]:
    """The same of one run of the script."""
    measured = Measured(compare=True)
    with default_dtype(dtype):
        measured.run(*flags)
    return measured.differences, measured.counts["gradient_all_reduces"]


def worker(args) -> None:
    """On the processes of this launch: one run with `flags`, or all runs that are compared."""
    if args.flags:
        measured = Measured()
        result = measured.run(*args.flags.split())
        result["train_peak_memory_gib"] = round(measured.peak_gib, 4)
        result["above_start_gib"] = round(measured.above_start_gib, 4)  # activations, gradients, moments
    else:
        result, (data, _) = {"gradients": [], "norms": {}}, load_images(args.dataset)
        flags = ["--dataset", args.dataset, "--batch_size", BATCH, "--num_epochs", 1]
        for variable_length in (False, True):
            for k in args.steps:
                for dtype in DTYPES:
                    extra = ["--gradient_accumulation_steps", k, *["--variable_length"] * variable_length]
                    row = {"variable_length": variable_length, "k": k, "dtype": dtype}
                    row["ours"] = ours(dtype, *flags, *extra)
                    row["naive"] = naive(data, variable_length, dtype, k)
                    result["gradients"].append(row)
        if not torch.distributed.is_initialized():
            for norm in ("batch", "layer"):
                extra = ["--norm", norm, "--gradient_accumulation_steps"]
                result["norms"][norm] = {k: max(ours("float64", *flags, *extra, k)[0]) for k in (1, 4)}
    common.finish_worker(args.worker, result)


def measure(args) -> dict:
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        for split, rows in (("train", NUM_IMAGES), ("test", 101)):
            name = f"{split}-00000-of-00001.parquet"
            part = pyarrow.parquet.read_table(common.ROOT / "data" / "mnist" / name).slice(0, rows)
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
