"""Memory of a transformer, by formula and measured.

    python benchmarks/transformer_memory.py

The model of scripts/transformer.py in three sizes, with AdamW, in float32, on the CPU. With N parameters, d features, h
hidden features (8/3 d), L layers and V tokens in the vocabulary, numbers of 4 bytes:

    parameters N = V d + L (4 d^2 + 3 d h + 2 d) + d; gradients N; AdamW's two moments 2 N
    activations of a token, kept for the backward pass: L (13 d + 4 h) + 3 d + V

`kept` is the memory that autograd saves for the backward pass, each storage once. `peak` is the peak of a process in
three steps, less what it used before the model; the C library is told to return freed tensors at once. Processor time
is the sum over all processes, per step. DDP and FSDP are two processes, each with half of the batch. Every process has
one thread.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts.transformer import Transformer
from utils.progress import own_peak_memory_gib

STEPS = 3
PARTS = 4  # micro-batches, where there are several


class Size(NamedTuple):
    vocabulary: int
    dim: int
    layers: int
    heads: int
    batch_size: int
    context: int = 256


SIZES = {
    "tiny": Size(300, 32, 2, 2, 8, 16),
    "small": Size(1024, 128, 4, 4, 16),
    "medium": Size(4096, 384, 6, 6, 16),
    "large": Size(16384, 768, 12, 12, 2),
}
# By name, the config that launches it.
WAYS = dict.fromkeys(("one process", f"{PARTS} micro-batches", "activation checkpointing", "bf16"), "cpu")
WAYS |= dict.fromkeys(("DDP", "FSDP"), "cpu_ddp")


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"], choices=SIZES)
    parser.add_argument("--compare", default="medium", choices=SIZES, help="the size for all ways (%(default)s)")
    parser.add_argument("--way", default="one process", choices=WAYS, help="of a --worker, with the first of --sizes")
    return parser.parse_args()


def formula(size: Size) -> dict[str, float]:
    """MiB of the parameters, and of the activations of a step."""
    hidden = 32 * round(size.dim * 8 / 3 / 32)
    block = 4 * size.dim**2 + 3 * size.dim * hidden + 2 * size.dim
    parameters = size.vocabulary * size.dim + size.layers * block + size.dim
    token = size.layers * (13 * size.dim + 4 * hidden) + 3 * size.dim + size.vocabulary
    return {"parameters": 4 * parameters / 2**20, "activations": 4 * token * size.batch_size * size.context / 2**20}


def kept_mib(model, tokens, targets) -> float:
    """What autograd keeps for the backward pass of one forward pass, beside the parameters."""
    parameters, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # the tensor, so that its memory is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, targets)
    return sum(size for size, _ in kept.values()) / 2**20


def worker(args) -> list[dict]:
    """What each process measures."""
    size, way = SIZES[args.sizes[0]], args.way
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo")
    before = psutil.Process().memory_info().rss
    model = Transformer(*size[:4])
    tokens = torch.randint(1, size.vocabulary, (size.batch_size, size.context))
    if way in ("DDP", "FSDP"):
        tokens = tokens.chunk(world_size)[rank]
    targets = tokens.roll(-1, 1)
    measured = {}
    if way == "activation checkpointing":
        model.checkpoint_activations = True
    elif way == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif way == "FSDP":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    autocast = torch.autocast("cpu", torch.bfloat16) if way == "bf16" else contextlib.nullcontext()
    parts = PARTS if "micro-batches" in way else 1
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        for part, target in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            with autocast:
                losses = (wrapped if way == "DDP" else model)(part, target)
            (losses.mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    measured["peak_mib"] = own_peak_memory_gib(tokens.device) * 1024 - before / 2**20
    measured["processor_s"] = min(seconds[1:])
    if way == "one process":
        measured["kept_mib"] = kept_mib(model, tokens, targets)
    gathered = [measured]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, measured)
    return gathered


def measure(args) -> dict:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # otherwise glibc keeps much of what was freed

    def launch(size, way):
        print(f"{size}, {way}", file=sys.stderr, flush=True)
        return common.launch_workers(WAYS[way], __file__, "--sizes", size, "--way", way)

    sizes = {size: launch(size, "one process")[0] for size in args.sizes}
    ways = {way: launch(args.compare, way) for way in WAYS}
    return {"sizes": sizes, "compare": args.compare, "ways": ways}


def report(measured) -> list[str]:
    columns = {"size": "{}", "batch x context": "{}", "parameters N, million": "{:.1f}", "weights, MiB": "{:.0f}"}
    columns |= {"gradients": "{:.0f}", "AdamW": "{:.0f}", "activations": "{:.0f}", "kept, measured": "{:.0f}"}
    columns |= {"weights + AdamW + activations": "{:.0f}", "peak, measured": "{:.0f}"}
    rows = []
    for name, each in measured["sizes"].items():
        size, mib = SIZES[name], formula(SIZES[name])
        weights, activations = mib["parameters"], mib["activations"]
        facts = [f"{name}: {size.dim} x {size.layers}", f"{size.batch_size} x {size.context}", weights * 2**20 / 4e6]
        total = 3 * weights + activations
        rows.append([*facts, weights, weights, 2 * weights, activations, each["kept_mib"], total, each["peak_mib"]])
    of_ways = {f"way, {measured['compare']}": "{}", "peak of a process, MiB": "{:.0f}", "/ one process": "{:.2f}"}
    of_ways |= {"processor time of a step, s": "{:.2f}", "/ one process ": "{:.2f}"}
    ways, (base,) = [], measured["ways"]["one process"]
    for way, processes in measured["ways"].items():
        peak = max(each["peak_mib"] for each in processes)
        seconds = sum(each["processor_s"] for each in processes)
        ways.append([way, peak, peak / base["peak_mib"], seconds, seconds / base["processor_s"]])
    return [common.table(columns, rows), common.table(of_ways, ways)]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
