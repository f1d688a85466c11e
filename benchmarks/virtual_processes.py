"""The price of `--virtual_processes`.

    python benchmarks/virtual_processes.py

Two processes with a thread each, under accelerate_configs/cpu_ddp.yaml: a script with V virtual
processes, and the same script with plain DDP and V / 2 accumulation steps, which has the same
micro-batches. ResNet-50 takes random images of 64 x 64 pixels. "sent" is what a process sends in a
step, counted by the kernel: a ring all-reduce sends the size of the gradients once on 2
processes.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

CONFIG = "cpu_ddp"
MIB = 2**20


def parse_args():
    parser = common.make_parser(__doc__, rounds=6)
    add = parser.add_argument
    add("--steps", type=int, default=6, help="steps of ResNet-50 in a turn (default: 6)")
    add("--worker", help="for the processes that it launches: where to write")
    return parser.parse_args()


def sent_bytes() -> int:
    """What all processes of this machine have sent to each other, with headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def run(name: str, *flags) -> list[float]:
    """Seconds of training, and MiB that a process sends, both a step."""
    before = sent_bytes()
    summary, _ = common.run_script(name, *flags)
    if not summary:
        return [0.0, 0.0]
    steps = summary["step"]
    seconds = summary["train_time_s"] - summary["checkpoint_time_s"]
    return [seconds / steps, (sent_bytes() - before) / steps / 2 / MIB]


def worker(args) -> None:
    workloads = {
        "MNIST, batch 512": ("mnist_mlp", ["--batch_size", 512, "--num_epochs", 1]),
        "ResNet-50, batch 32": (
            "resnet50",
            ["--synthetic", "--image_size", 64, "--batch_size", 32, "--max_steps", args.steps],
        ),
    }
    measured = {}
    for workload, (name, flags) in workloads.items():
        for number in (2, 8):
            own = [*flags, "--virtual_processes", number]
            plain = [*flags, "--gradient_accumulation_steps", number // 2]
            ways = {
                f"V = {number}": lambda name=name, own=own: run(name, *own),
                f"DDP, {number // 2} accumulation steps": lambda name=name, plain=plain: run(name, *plain),
            }
            common.take_turns(ways, 1)  # warm-up
            rounds = args.rounds if name == "mnist_mlp" else max(2, args.rounds // 2)
            measured.setdefault(workload, []).append(common.take_turns(ways, rounds))
    common.finish_worker(args.worker, measured)


def measure(args) -> dict:
    return common.launch_workers(CONFIG, __file__, "--rounds", args.rounds, "--steps", args.steps)


def report(measured) -> common.Report:
    columns = {"run": "{}", "way": "{}", "turns": "{}", "median ms a step": "{:.2f}"}
    columns |= {"min": "{:.2f}", "max": "{:.2f}", "/ DDP": "{:.3f}", "sent, MiB": "{:.2f}"}
    rows, bars, goals = [], {}, []
    for workload, pairs in measured.items():
        for ways in pairs:
            medians = {way: statistics.median(seconds for seconds, _ in turns) for way, turns in ways.items()}
            own, plain = ways
            for way, turns in ways.items():
                times = [1000 * seconds for seconds, _ in turns]
                sent = statistics.median(mib for _, mib in turns)
                ratio = medians[way] / medians[plain]
                rows.append([workload, way, len(turns), 1000 * medians[way]])
                rows[-1] += [min(times), max(times), ratio, sent]
            bars[f"{workload}, {own}"] = medians[own] / medians[plain]
            if "ResNet" in workload:
                what = f"virtual processes, {workload}, {own}, against DDP"
                goals.append(common.Goal(what, bars[f"{workload}, {own}"], 1.1, "{:.3f} x"))
    bars = common.Bars("virtual processes: time / plain DDP's", bars, "{:.3f}", 1.1, ours=len(bars))
    return common.Report([common.table(columns, rows)], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
