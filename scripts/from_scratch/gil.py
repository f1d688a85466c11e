"""Threads against processes: what the GIL costs layers of PyTorch, large and small.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/from_scratch/gil.py

Only one thread of a process runs Python at a time: the one that holds the GIL. PyTorch releases the GIL inside every
operation, and during the backward pass, except for hooks and autograd.Functions written in Python. So threads wait for
each other only in the Python between operations: hardly ever with large layers, most of the time with small ones.
nn.DataParallel has a thread for each device, DistributedDataParallel a process.

On 2 idle CPU cores, torch 2.15, the speed-up of the forward pass of small layers is 0.88 with 2 threads and 1.83 with 2
processes; with large layers it is 1.87 and 1.78. Other programs on the same cores reduce the speed-up, so each ratio is
measured several times: the script prints and draws the median with the lowest and the highest.
Source: https://docs.python.org/3/glossary.html#term-global-interpreter-lock.
"""

import multiprocessing
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from pictures import save_picture  # the file beside this one

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import plural, show, stop
from utils.run_folder import RunFolder

MODELS = {"large layers": (2, 512, 128, 1), "small layers": (100, 8, 8, 4)}  # layers, width, rows, forward passes
PASSES = ("forward", "backward")
REPEATS = 5  # the fastest repeat counts, to leave out the time that other programs take


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--workers", type=flags.positive_int, default=2, help="threads, or processes, at once")
    measuring.add_argument("--rounds", type=flags.positive_int, default=5, help="how often each ratio is measured")
    parser.add_run_flags()
    return parser.parse_args()


def best_times(name, seed, barrier):
    """(forward_s, backward_s): the shortest times until all workers that share the barrier are done."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers, width, rows, count = MODELS[name]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    x = torch.ones(rows, width)
    times = []
    for _ in range(REPEATS):
        barrier.wait(60)
        start = time.perf_counter()
        outputs = [model(x) for _ in range(count)]
        barrier.wait(60)
        half = time.perf_counter()
        for output in outputs:
            output.sum().backward()
        barrier.wait(60)
        times.append((half - start, time.perf_counter() - half))
    return [min(column) for column in zip(*times, strict=True)]


def set_barrier(barrier):
    global shared_barrier  # set when a process starts: a barrier cannot be sent to a process later
    shared_barrier = barrier


def best_times_in_process(name, seed):
    return best_times(name, seed, shared_barrier)


def measure(workers: int, rounds: int, seed: int) -> dict:
    """The speed-up of threads, and of processes, over running the workers one after another.

    Returns:
        {(model, pass): {"threads": [ratio of each round], "processes": [...]}}
    """
    # Forking is fast, but unsafe outside Linux or once a GPU has been used.
    can_fork = sys.platform == "linux" and not torch.accelerator.is_available()
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    pool = ProcessPoolExecutor(workers, context, set_barrier, (context.Barrier(workers),))
    ratios = {(name, which): {"threads": [], "processes": []} for name in MODELS for which in PASSES}
    with pool as processes, ThreadPoolExecutor(workers) as threads:
        for name in [*MODELS] * rounds:
            work, barrier = ([name] * workers, [seed] * workers), threading.Barrier(workers)
            times = {
                "processes": list(processes.map(best_times_in_process, *work)),
                "threads": list(threads.map(best_times, *work, [barrier] * workers)),
            }
            alone = best_times(name, seed, threading.Barrier(1))
            for way, worker_times in times.items():
                slowest = [max(column) for column in zip(*worker_times, strict=True)]
                for which, one_s, all_s in zip(PASSES, alone, slowest, strict=True):
                    ratios[name, which][way].append(workers * one_s / all_s)
    return ratios


def draw(ratios: dict, title: str):
    """A pair of bars for each model and pass: the medians, and a line from the lowest to the highest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, (way, colour) in enumerate((("threads", "#0072b2"), ("processes", "#d55e00"))):
        medians = [statistics.median(ways[way]) for ways in ratios.values()]
        below = [median - min(ways[way]) for median, ways in zip(medians, ratios.values(), strict=True)]
        above = [max(ways[way]) - median for median, ways in zip(medians, ratios.values(), strict=True)]
        positions = [group + 0.4 * i - 0.2 for group in range(len(ratios))]
        axes.bar(positions, medians, 0.4, yerr=(below, above), capsize=4, color=colour, label=way)
        for x, median in zip(positions, medians, strict=True):
            axes.text(x, 0.03, f"{median:.2f}", ha="center", color="white")
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="one after another")
    axes.set_xticks(range(len(ratios)), [f"{name}\n{which}" for name, which in ratios])
    axes.set(ylabel="speed-up", title=title)
    axes.margins(y=0.15)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    if accelerator.num_processes > 1:
        stop(f"gil.py starts its own processes, got {accelerator.num_processes} from the launcher: use cpu.yaml")
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    ratios = measure(args.workers, args.rounds, args.seed)
    print(f"speed-up of {plural(args.workers, 'worker')} over one after another: median (lowest to highest)")
    for (name, which), ways in ratios.items():
        columns = []
        for way, values in ways.items():
            columns.append(f"{way} {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"  {f'{name}, {which}':<24}" + "   ".join(columns), flush=True)
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    record = {", ".join(key): ways for key, ways in ratios.items()}
    write_json(folder.path / "run.json", {**facts, "results": record})
    title = f"{plural(args.workers, 'worker')}, in threads and in processes, {args.rounds} rounds"
    save_picture(folder.path / "gil.png", lambda: draw(ratios, title))
    show(f"done: the numbers are in {folder.path}/run.json, a picture in gil.png")


if __name__ == "__main__":
    main()
