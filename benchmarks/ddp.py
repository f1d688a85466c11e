"""Two processes: DDP through Accelerate and raw.

    python benchmarks/ddp.py

Two processes with one thread each, under accelerate_configs/cpu_ddp.yaml. In the same processes, an epoch of MNIST or a
few steps of ResNet-50 on random images of 64 x 64 pixels: the unchanged script, then a loop of torch.distributed alone,
with DDP and `gradient_as_bucket_view`, that has the same model, optimizer, schedule and images, and neither logs,
counts, nor looks for signals. The start, and the checkpoint at the script's end, are left out.
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


def parse_args():
    parser = common.make_parser(__doc__, rounds=16, dataset=True, worker=True)
    add = parser.add_argument
    add("--steps", type=common.positive_int, default=6, help="steps of ResNet-50 in a turn (%(default)s)")
    add("--batches", type=common.positive_int, nargs="+", default=[512, 256], help="batch sizes of MNIST")
    add("--resnet50_batch", type=common.positive_int, default=32, help="batch size of ResNet-50 (%(default)s)")
    return parser.parse_args()


def script(name: str, *flags) -> float:
    """Seconds of a script's training loop, on the main process."""
    summary, _ = common.run_script(name, *flags)
    return common.training_s(summary)


def raw(model, optimizer, scheduler, batches, normalize=lambda images: images) -> float:
    """Seconds of a plain loop.

    Args:
        normalize: makes the model's input from a batch of images.
    """
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


def raw_mnist(dataset: str, batch_size: int) -> float:
    data, _ = mnist_mlp.load_images(dataset)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = mnist_mlp.MLP(784, 192, 10)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1, fused=True)
    parts = [batch.tensor_split(processes)[rank] for batch in torch.randperm(len(data)).split(batch_size)]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, len(parts), cycle_momentum=False)
    batches = ([tensor.index_select(0, part) for tensor in data.tensors] for part in parts)
    return raw(model, optimizer, scheduler, batches)


def raw_resnet50(batch_size: int, steps: int) -> float:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(zero_init_residual=True).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-5, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    size = batch_size // distributed.get_world_size()
    images = torch.randint(256, (size, 64, 64, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    batches = [(images, torch.randint(1000, (size,)))] * steps
    return raw(model, optimizer, scheduler, batches, resnet50.normalize)


def worker(args) -> None:
    mnist = ["--dataset", args.dataset, "--num_epochs", 1]
    synthetic = ["--synthetic", "--image_size", 64, "--batch_size", args.resnet50_batch, "--max_steps", args.steps]
    workloads = {
        f"MNIST, batch {batch}": {
            "script": lambda batch=batch: script("mnist_mlp", *mnist, "--batch_size", batch),
            "raw DDP": lambda batch=batch: raw_mnist(args.dataset, batch),
        }
        for batch in args.batches
    }
    workloads[f"ResNet-50, batch {args.resnet50_batch}"] = {
        "script": lambda: script("resnet50", *synthetic),
        "raw DDP": lambda: raw_resnet50(args.resnet50_batch, args.steps),
    }
    measured = {}
    for workload, ways in workloads.items():
        common.take_turns(ways, 1)  # warm-up; and the script starts the process group
        rounds = args.rounds if "MNIST" in workload else max(1, args.rounds // 4)
        measured[workload] = common.take_turns(ways, rounds)
    common.finish_worker(args.worker, measured)


def measure(args) -> dict:
    flags = ["--rounds", args.rounds, "--steps", args.steps, "--dataset", args.dataset]
    flags += ["--batches", *args.batches, "--resnet50_batch", args.resnet50_batch]
    return common.launch_workers("cpu_ddp", __file__, *flags)


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "turns": "{}", "median s": "{:.3f}"}
    columns |= {"min": "{:.3f}", "max": "{:.3f}", "/ raw DDP": "{:.3f}"}
    rows, ratios = [], {}
    for workload, ways in measured.items():
        base = statistics.median(ways["raw DDP"])
        for way, seconds in ways.items():
            median = statistics.median(seconds)
            rows.append([workload, way, len(seconds), median, min(seconds), max(seconds), median / base])
        ratios[workload] = statistics.median(ways["script"]) / base
    goals = [
        common.Goal(f"DDP, {workload}, against raw DDP", ratio, 1.03, "{:.3f} x the time")
        for workload, ratio in ratios.items()
    ]
    bars = common.Bars("DDP, 2 processes: time / raw DDP's", ratios, "{:.3f}", goal=1.03, ours=len(ratios))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
