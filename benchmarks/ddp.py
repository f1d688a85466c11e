"""Two processes: DDP through Accelerate and raw.

    python benchmarks/ddp.py

Two processes with a thread each, under accelerate_configs/cpu_ddp.yaml. In the same processes, an
epoch of MNIST or a few steps of ResNet-50 on random images of 64 x 64 pixels: the unchanged
script, then a loop of torch.distributed alone, with DDP and `gradient_as_bucket_view`, that has the
same model, optimizer, schedule and images, and neither logs, counts, nor looks for signals.
Start-up, and the checkpoint at the script's end, are left out.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp, resnet50
from utils.datasets.images_in_memory import BUNDLED_MNIST

CONFIG = "cpu_ddp"


def parse_args():
    parser = common.make_parser(__doc__, rounds=16)
    add = parser.add_argument
    add("--steps", type=int, default=6, help="steps of ResNet-50 in a turn (default: 6)")
    add("--worker", help="for the processes that it launches: where to write")
    return parser.parse_args()


def script(name: str, *flags) -> float:
    """Seconds of a script's training loop, on the main process."""
    summary, _ = common.run_script(name, *flags)
    return summary["train_time_s"] - summary["checkpoint_time_s"] if summary else 0.0


def raw(model, optimizer, scheduler, batches, normalize=lambda images: images) -> float:
    """Seconds of a plain loop. normalize: makes the model's input of a batch of images."""
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    distributed.barrier()
    began = time.perf_counter()
    for images, labels in batches:
        loss = F.cross_entropy(model(normalize(images)), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    loss.item()
    return time.perf_counter() - began


def raw_mnist(batch_size: int) -> float:
    data, _ = mnist_mlp.load_images(BUNDLED_MNIST)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = mnist_mlp.MLP(784, 192, 10)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1, fused=True)
    order = torch.randperm(len(data))
    parts = [batch.tensor_split(processes)[rank] for batch in order.split(batch_size)]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, len(parts), cycle_momentum=False)
    batches = ((data.images.index_select(0, part), data.labels.index_select(0, part)) for part in parts)
    return raw(model, optimizer, scheduler, batches)


def raw_resnet50(batch_size: int, steps: int) -> float:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(zero_init_residual=True)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-5, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    size = batch_size // distributed.get_world_size()
    images = torch.randint(256, (size, 64, 64, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.randint(1000, (size,))
    batches = [(images, labels)] * steps
    return raw(model, optimizer, scheduler, batches, resnet50.normalize)


def worker(args) -> None:
    size = ["--synthetic", "--image_size", 64, "--batch_size", 32, "--max_steps", args.steps]
    workloads = {
        f"MNIST, batch {batch}": (
            lambda batch=batch: script("mnist_mlp", "--batch_size", batch, "--num_epochs", 1),
            lambda batch=batch: raw_mnist(batch),
        )
        for batch in (512, 256)
    }
    workloads["ResNet-50, batch 32"] = (lambda: script("resnet50", *size), lambda: raw_resnet50(32, args.steps))
    measured = {}
    for workload, (ours, theirs) in workloads.items():
        ways = {"script": ours, "raw DDP": theirs}
        common.take_turns(ways, 1)  # warm-up; and the script starts the process group
        rounds = args.rounds if "MNIST" in workload else max(1, args.rounds // 4)
        measured[workload] = common.take_turns(ways, rounds)
    common.finish_worker(args.worker, measured)


def measure(args) -> dict:
    return common.launch_workers(CONFIG, __file__, "--rounds", args.rounds, "--steps", args.steps)


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "turns": "{}", "median s": "{:.3f}"}
    columns |= {"min": "{:.3f}", "max": "{:.3f}", "/ raw DDP": "{:.3f}"}
    rows, bars, goals = [], {}, []
    for workload, ways in measured.items():
        medians = {way: statistics.median(seconds) for way, seconds in ways.items()}
        ratios = {way: median / medians["raw DDP"] for way, median in medians.items()}
        for way, seconds in ways.items():
            times = medians[way], min(seconds), max(seconds)
            rows.append([workload, way, len(seconds), *times, ratios[way]])
        bars[workload] = ratios["script"]
        what = f"DDP, {workload}, against raw DDP"
        goals.append(common.Goal(what, ratios["script"], 1.03, "{:.3f} x the time"))
    title = "DDP, 2 processes: time / raw DDP's"
    bars = common.Bars(title, bars, "{:.3f}", goal=1.03, ours=len(bars))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
