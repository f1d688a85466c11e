"""Gradients of micro-batches against the whole batch's.

    python benchmarks/gradient_accumulation.py

1069 images of MNIST in batches of 128: 8 steps and a last one of 45 images. For k micro-batches on P processes, the
largest relative difference of a gradient to the gradient of the whole batch, by plain autograd on one process: in the
full steps of the epoch, and in the last one. The learning rate is 0, so all steps have the same weights.

- ours: scripts/gradient_accumulation.py, unchanged
- naive: `loss = criterion(...) / k; backward(); if (i + 1) % k == 0 or last: step()` with a mean as criterion, a
  prepared DataLoader and DDP, unchanged

All-reduces are those of gradients in the epoch, counted in DDP's communication hook. Then BatchNorm and LayerNorm, on
one process in float64; and the peak memory of a process in two steps of 16384 images, libraries included.
"""

import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pyarrow.parquet
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts.gradient_accumulation import CellNet, count_ink_cells, losses_and_predictions
from utils.data.images import load_images
from utils.sampler import GlobalSampler

NUM_IMAGES, BATCH, MEMORY_BATCH = 1069, 128, 16384
CONFIGS = {1: "cpu", 2: "cpu_ddp"}


def parse_args():
    parser = common.make_parser(__doc__)
    steps = {"type": int, "default": [1, 4, 8], "nargs": "*"}
    parser.add_argument("--steps", help="accumulation steps (k)", **steps)
    parser.add_argument("--memory_steps", help="the same, for memory", **(steps | {"default": [1, 8]}))
    parser.add_argument("--dataset", help="for the processes that it launches")
    return parser.parse_args()


class Recorder:
    """Gradients of all steps, and the number of all-reduces, of a training loop inside of `with`."""

    def __enter__(self):
        self.gradients, self.all_reduces = [], 0
        ddp, recorder = torch.nn.parallel.DistributedDataParallel, self

        class CountingDDP(ddp):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.register_comm_hook(None, recorder.all_reduce)

        self.ddp = mock.patch.object(torch.nn.parallel, "DistributedDataParallel", CountingDDP)
        self.ddp.start()
        self.hook = register_optimizer_step_pre_hook(self.record)
        return self

    def __exit__(self, *_):
        self.hook.remove()
        self.ddp.stop()

    def record(self, optimizer, args, kwargs):
        """torch calls it before each step of an optimizer."""
        self.parameters = optimizer.param_groups[0]["params"]
        self.gradients.append(flat(parameter.grad for parameter in self.parameters))

    def all_reduce(self, group, bucket):
        """DDP calls it for each bucket of gradients, in place of its own all-reduce; before training, with zeros."""
        self.all_reduces += bool(bucket.buffer().any())
        return allreduce_hook(group, bucket)

    def differences(self, batches, norm: str, variable_length: bool) -> list[float]:
        """Of each step's gradient, the largest relative to the largest entry of the whole batch's gradient."""
        model = CellNet(1, 10, norm, variable_length).to(self.parameters[0].dtype)
        nn.utils.vector_to_parameters(flat(self.parameters), model.parameters())
        found = []
        for gradient, batch in zip(self.gradients, batches, strict=True):
            model.zero_grad()
            mean_loss(model, batch).backward()
            expected = flat(parameter.grad for parameter in model.parameters())
            found.append(float((gradient - expected).abs().max() / expected.abs().max()))
        return found


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def mean_loss(model, batch) -> torch.Tensor:
    losses, _ = losses_and_predictions(model, *batch)
    weights = count_ink_cells(batch) if model.variable_length else torch.ones_like(losses)
    return (losses * weights).sum() / weights.sum()


def naive(data, variable_length: bool, k: int) -> None:
    """The loop of blog posts; `data` is in the order of the epoch."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    bare = CellNet(1, 10, "none", variable_length)
    optimizer = torch.optim.SGD(bare.parameters(), 0.0)
    loader = DataLoader(data, BATCH // k // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    model.variable_length = variable_length
    for i, batch in enumerate(loader):
        accelerator.backward(mean_loss(model, batch) / k)
        if (i + 1) % k == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def ours(dataset: str, variable_length: bool, k: int, norm: str = "none") -> None:
    flags = ["--dataset", dataset, "--batch_size", BATCH, "--num_epochs", 1, "--lr", 0, "--max_grad_norm", 0]
    flags += ["--norm", norm, "--gradient_accumulation_steps", k, *["--variable_length"] * variable_length]
    common.run_script("gradient_accumulation", *flags)


def worker(args) -> dict:
    """By way, kind of loss, type of numbers and k: largest difference in full steps, in the last step, all-reduces."""
    images, _ = load_images(args.dataset)
    order, _ = GlobalSampler(len(images), BATCH, seed=0).items(epoch=0)
    epoch = Subset(images, order.tolist())
    batches = [images[rows] for rows in order.split(BATCH)]

    def look(train, dtype: str, variable_length: bool = False, norm: str = "none") -> list:
        torch.set_default_dtype(getattr(torch, dtype))
        with Recorder() as recorder:
            train()
        *full, last = recorder.differences(batches, norm, variable_length)
        torch.set_default_dtype(torch.float32)
        return [max(full), last, recorder.all_reduces]

    gradients, norms = [], {}
    for variable_length in (False, True):
        for k in args.steps:
            for dtype in ("float64", "float32"):
                row = {"variable_length": variable_length, "k": k, "dtype": dtype}
                for way, train, data in (("ours", ours, args.dataset), ("naive", naive, epoch)):
                    row[way] = look(functools.partial(train, data, variable_length, k), dtype, variable_length)
                gradients.append(row)
    if not distributed.is_initialized():
        for norm in ("batch", "layer"):
            norms[norm] = {
                k: max(look(functools.partial(ours, args.dataset, False, k, norm), "float64", norm=norm)[:2])
                for k in (1, 4)
            }
    return {"gradients": gradients, "norms": norms}


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        for split, rows in (("train", NUM_IMAGES), ("test", 101)):
            name = f"{split}-00000-of-00001.parquet"
            part = pyarrow.parquet.read_table(common.ROOT / "data" / "mnist" / name).slice(0, rows)
            pyarrow.parquet.write_table(part, Path(folder) / name)
        flags = ["--dataset", folder, "--steps", *args.steps]
        measured = {processes: common.launch_workers(config, __file__, *flags) for processes, config in CONFIGS.items()}
    memory = []
    for processes, config in CONFIGS.items():
        for k in args.memory_steps:
            flags = ["--batch_size", MEMORY_BATCH, "--max_steps", 2, "--gradient_accumulation_steps", k]
            summary, _ = common.launch_script(config, "gradient_accumulation", *flags)
            memory.append([processes, k, summary["peak_memory_gib"]])
    return {"by_processes": measured, "memory": memory}


def report(measured) -> list[str]:
    columns = {"P": "{}", "k": "{}", "numbers": "{}"}
    for way in ("ours", "naive"):
        columns |= {way: "{:.1e}", f"{way}, last step": "{:.1e}", f"{way}, all-reduces": "{}"}
    rows = {False: [], True: []}
    for processes, results in measured["by_processes"].items():
        for row in results["gradients"]:
            cells = [processes, row["k"], row["dtype"], *row["ours"], *row["naive"]]
            rows[row["variable_length"]].append(cells)
    norms = [[norm, *by_k.values()] for norm, by_k in measured["by_processes"]["1"]["norms"].items()]
    return [
        f"One term per sample:\n\n{common.table(columns, rows[False])}",
        f"Samples of different weight (`--variable_length`):\n\n{common.table(columns, rows[True])}",
        f"Norms:\n\n{common.table({'norm': '{}', 'k = 1': '{:.1e}', 'k = 4': '{:.1e}'}, norms)}",
        f"Memory:\n\n{common.table({'P': '{}', 'k': '{}', 'peak of a process, GiB': '{:.2f}'}, measured['memory'])}",
    ]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
