"""The price of `--virtual_processes`.

    python benchmarks/virtual_processes.py

Two processes with one thread each, under accelerate_configs/cpu_ddp.yaml and cpu_fsdp.yaml: a script with V virtual
processes, and the same script with plain DDP or FSDP and V / 2 accumulation steps, which has the same micro-batches.
ResNet-50 takes random images of 64 x 64 pixels.
"""

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.console import plural


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, dataset=True)
    add = parser.add_argument
    add("--steps", type=common.positive_int, default=4, help="steps of ResNet-50 in a turn (%(default)s)")
    add("--numbers", type=int, nargs="+", default=[2, 8], help="values of V (%(default)s)")
    add("--resnet50_batch", type=common.positive_int, default=32, help="batch size of ResNet-50 (%(default)s)")
    return parser.parse_args()


def step_ms(name: str, *flags) -> float:
    """Of the training loop, on the main process."""
    summary, _ = common.run_script(name, *flags)
    return 1000 * common.training_s(summary) / summary["step"] if summary else 0.0


def worker(args) -> list:
    synthetic = ["--synthetic", "--image_size", 64, "--batch_size", args.resnet50_batch, "--max_steps", args.steps]
    workloads = {
        "MNIST, batch 512": ("mnist_mlp", "--dataset", args.dataset, "--batch_size", 512, "--num_epochs", 1),
        f"ResNet-50, batch {args.resnet50_batch}": ("resnet50", *synthetic),
    }
    plain = "FSDP" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "DDP"
    measured = []
    for workload, script in workloads.items():
        for number in args.numbers:
            accumulation = number // 2
            ways = {
                f"{plain}, {plural(accumulation, 'micro-batch')}": ("--gradient_accumulation_steps", accumulation),
                f"{plain}, V = {number}": ("--virtual_processes", number),
            }
            ways = {way: functools.partial(step_ms, *script, *flags) for way, flags in ways.items()}
            measured.append([workload, common.take_turns(ways, args.rounds, warm_up=True)])
    return measured


def measure(args) -> list:
    return [row for config in ("cpu_ddp", "cpu_fsdp") for row in common.launch_workers(config, __file__)]


def report(measured) -> list[str]:
    return [common.compare("run", measured, "ms per step", "plain", "{:.2f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
