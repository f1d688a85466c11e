"""Averages a gradient through rank 0 and by an all-reduce, on 1, 2, ... processes: time and traffic of each way.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 4 scripts/from_scratch/averaging.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/from_scratch/averaging.py --size_mib 100

All ways give the same mean, which is checked on each process. The traffic differs: a parameter server on rank 0
receives n - 1 gradients and sends n - 1 means, so its network is the bottleneck; in a ring all-reduce, a process sends
2 (n-1)/n of a gradient, which is less than twice its size for any n. Gradients are averaged because their mean is the
gradient of the mean loss over the samples of all processes: the learning rate need not depend on their number.
Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from pictures import save_picture  # the file beside this one

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import show, stop
from utils.run_folder import RunFolder

MIB = 2**20


# The ways. Each replaces `gradient` by the mean of the gradients of ranks 0 to n - 1, which form `group`.


def parameter_server(gradient, rank, n, group):
    """rank 0 receives the gradients of the other processes, and sends them the mean"""
    if rank == 0:
        received = torch.empty_like(gradient)
        for other in range(1, n):
            dist.recv(received, other, group=group)
            gradient += received
        gradient /= n
        for other in range(1, n):
            dist.send(gradient, other, group=group)
    else:
        dist.send(gradient, 0, group=group)
        dist.recv(gradient, 0, group=group)


def reduce_broadcast(gradient, rank, n, group):
    """the same in two collectives: the library may add and send along a tree or a ring"""
    dist.reduce(gradient, dst=0, group=group)
    if rank == 0:  # not a collective: the others get the mean from the broadcast
        gradient /= n
    dist.broadcast(gradient, src=0, group=group)


def all_reduce(gradient, rank, n, group):
    """one collective, in which no process has a special role"""
    dist.all_reduce(gradient, group=group)
    gradient /= n


WAYS = {"parameter server": parameter_server, "reduce, broadcast": reduce_broadcast, "all_reduce": all_reduce}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--size_mib", type=flags.positive_int, default=4, help="size of the gradient in MiB")
    measuring.add_argument("--repetitions", type=flags.positive_int, default=10, help="timed calls of each way")
    measuring.add_argument("--warmup", type=flags.non_negative_int, default=2, help="calls before the timed ones")
    parser.add_run_flags()
    return parser.parse_args()


def make_gradients(count: int, n: int, seed: int) -> torch.Tensor:
    """The gradients of all ranks, (n, count): small integers, whose sum is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (n, count), generator=generator).float()


def written_bytes() -> int:
    """Bytes that this process has written to sockets and files, as counted by Linux; 0 on other systems.

    NCCL's transfers between GPUs bypass the kernel and are not counted.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["wchar"])


def measure(way, gradients, rank: int, group, args, device) -> dict:
    """Check and time one way on the ranks of `group`. Collective (in the group).

    Args:
        gradients: (n, count), one for each rank of the group.

    Returns:
        The median time of the slowest process, and the median traffic of the process that sends most.

    Raises:
        SystemExit: if the mean is wrong on this rank.
    """
    n = len(gradients)
    expected = gradients.sum(0) / n
    costs = []  # (seconds, bytes) of each call
    for _ in range(args.warmup + args.repetitions):
        gradient = gradients[rank].to(device, copy=True)
        dist.barrier(group)
        written, start = written_bytes(), time.perf_counter()
        way(gradient, rank, n, group)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        costs.append((time.perf_counter() - start, written_bytes() - written))
        if not torch.equal(gradient.cpu(), expected):
            stop(f"wrong mean by {way.__name__} on rank {rank} of {n}", alone=True)
    most = torch.tensor(costs[args.warmup :], dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    seconds, sent = most.T.tolist()
    return {"time_ms": 1000 * statistics.median(seconds), "sent_mib": statistics.median(sent) / MIB}


def draw(rows: list[dict], size_mib: int, title: str):
    """The traffic over the number of processes, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = sorted({row["processes"] for row in rows})
    for name in WAYS:
        sent_mib = [row["sent_mib"] for row in rows if row["way"] == name]
        axes.plot(numbers, sent_mib, "o-", label=name)
    style = {"color": "grey", "linewidth": 6, "alpha": 0.4, "zorder": 0}
    server, ring = [size_mib * (n - 1) for n in numbers], [size_mib * 2 * (n - 1) / n for n in numbers]
    axes.plot(numbers, server, "-", **style, label="server: (n-1) S, in theory")
    axes.plot(numbers, ring, ":", **style, label="ring: 2 (n-1)/n S, in theory")
    axes.set(title=title, ylabel="MiB sent by the process that sends most", xlabel="processes n", xticks=numbers)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    world_size, rank = accelerator.num_processes, accelerator.process_index
    if world_size == 1:
        accelerator.print("one process has nothing to send: add --num_processes 4")
        return accelerator.end_training()
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    gradients = make_gradients(args.size_mib * MIB // 4, world_size, args.seed)
    # Every process must create every group, also those that it does not belong to.
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size + 1)}
    rows = []
    accelerator.print("processes  way                  ms   most MiB sent by a process", flush=True)
    for n, group in groups.items():
        for name, way in WAYS.items():
            if rank < n:
                measured = measure(way, gradients[:n], rank, group, args, accelerator.device)
                rows.append({"processes": n, "way": name, **measured})
                numbers = f"{measured['time_ms']:>9.2f} {measured['sent_mib']:>12.2f}"
                accelerator.print(f"{n:>9}  {name:<18}{numbers}", flush=True)
            dist.barrier()
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    if accelerator.is_main_process:
        write_json(folder.path / "run.json", {**facts, "results": rows})
        title = f"Mean of a gradient of {args.size_mib} MiB, {facts['backend']}"
        save_picture(folder.path / "averaging.png", lambda: draw(rows, args.size_mib, title))
        show(f"done: the means are right; numbers and a picture are in {folder.path}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
