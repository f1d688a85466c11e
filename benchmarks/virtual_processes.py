"""The price of `--virtual_processes`.

    python benchmarks/virtual_processes.py

Two processes with one thread each, under accelerate_configs/cpu_ddp.yaml: a script with V virtual processes, and the
same script with plain DDP and V / 2 accumulation steps, which has the same micro-batches. ResNet-50 takes random images
of 64 x 64 pixels. "sent" is what a process sends in a step, counted by the kernel: on 2 processes a ring all-reduce
sends the size of the gradients once.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

MIB = 2**20


def parse_args():
    parser = common.make_parser(__doc__, rounds=6, dataset=True, worker=True)
    add = parser.add_argument
    add("--steps", type=common.positive_int, default=6, help="steps of ResNet-50 in a turn (%(default)s)")
    add("--numbers", type=int, nargs="+", default=[2, 8], help="values of V (%(default)s)")
    add("--resnet50_batch", type=common.positive_int, default=32, help="batch size of ResNet-50 (%(default)s)")
    return parser.parse_args()


def sent_bytes() -> int:
    """What all processes of this machine have sent to each other, with headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def run(name: str, *flags) -> list[float]:
    """Seconds of training, and MiB that a process sends, both per step."""
    before = sent_bytes()
    summary, _ = common.run_script(name, *flags)
    if not summary:
        return [0.0, 0.0]
    return [common.training_s(summary) / summary["step"], (sent_bytes() - before) / summary["step"] / 2 / MIB]


def worker(args) -> None:
    synthetic = ["--synthetic", "--image_size", 64, "--batch_size", args.resnet50_batch, "--max_steps", args.steps]
    workloads = {
        "MNIST, batch 512": ("mnist_mlp", ["--dataset", args.dataset, "--batch_size", 512, "--num_epochs", 1]),
        f"ResNet-50, batch {args.resnet50_batch}": ("resnet50", synthetic),
    }
    measured = {}
    for workload, (name, flags) in workloads.items():
        rounds = args.rounds if name == "mnist_mlp" else max(1, args.rounds // 2)
        for number in args.numbers:
            pair = {
                f"V = {number}": ["--virtual_processes", number],
                f"DDP, {number // 2} micro-batches": ["--gradient_accumulation_steps", number // 2],
            }
            ways = {way: lambda name=name, all=(*flags, *own): run(name, *all) for way, own in pair.items()}
            common.take_turns(ways, 1)  # warm-up
            measured.setdefault(workload, []).append(common.take_turns(ways, rounds))
    common.finish_worker(args.worker, measured)


def measure(args) -> dict:
    flags = ["--rounds", args.rounds, "--steps", args.steps, "--dataset", args.dataset]
    flags += ["--numbers", *args.numbers, "--resnet50_batch", args.resnet50_batch]
    return common.launch_workers("cpu_ddp", __file__, *flags)


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "turns": "{}", "median ms per step": "{:.2f}"}
    columns |= {"min": "{:.2f}", "max": "{:.2f}", "/ DDP": "{:.3f}", "sent, MiB": "{:.2f}"}
    rows, ratios = [], {}
    for workload, pairs in measured.items():
        for ways in pairs:
            own, plain = ways
            base = statistics.median(seconds for seconds, _ in ways[plain])
            for way, turns in ways.items():
                times, sent = ([turn[i] for turn in turns] for i in (0, 1))
                median = statistics.median(times)
                cells = [1000 * seconds for seconds in (median, min(times), max(times))]
                rows.append([workload, way, len(turns), *cells, median / base, statistics.median(sent)])
            ratios[f"{workload}, {own}"] = statistics.median(seconds for seconds, _ in ways[own]) / base
    goals = [
        common.Goal(f"virtual processes, {run}, against DDP", ratio, 1.1, "{:.3f} x")
        for run, ratio in ratios.items()
        if "ResNet" in run
    ]
    bars = common.Bars("virtual processes: time / plain DDP's", ratios, "{:.3f}", 1.1, ours=len(ratios))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
