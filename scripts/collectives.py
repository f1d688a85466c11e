"""What the wires between the processes do: each collective checked, timed and drawn, before GPU-hours are spent on it.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/collectives.py --explain --simulate
    accelerate launch --config_file accelerate_configs/multi_node.yaml scripts/collectives.py --sizes 8 1M 256M

Every operation is first run on numbers whose result is known, on every process and at every size; a wrong result ends
the run with exit code 1 and its name. Then it is timed: a barrier, the call, the slowest process counts, the median of
the repetitions. Over gloo on 2 CPU cores, torch 2.15: 10 s, and 1.3 GB/s of bus bandwidth for an all_reduce of 4 MiB
between 2 processes; 24 s and 0.5 GB/s between 4.
Bandwidths as in nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import inspect
import math
import re
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import launch
from utils.tracking import Tracker, git_commit, versions, write, write_json
from utils.wires import (
    describe_pairs,
    describe_simulation,
    leave_together,
    median_pair,
    share_verdicts,
    slow_pairs,
    time_pairs,
    timed,
)

CHECK_BYTES = 2**30  # a check makes the inputs of all processes; sizes for which that takes more are only timed
NOT_SUPPORTED = re.compile("not support|unsupported|cannot use|not implemented", re.IGNORECASE)


def num_bytes(text: str) -> int:
    """8, 4K, 1M, 2G: units of 1024, as in nccl-tests."""
    digits, unit = text[:-1], text[-1:].upper()
    if unit not in "KMG":
        digits, unit = text, " "
    return launch.at_least(1)(digits) * 1024 ** " KMG".index(unit)


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    size, real, positive = launch.at_least(1), launch.at_least(0.0, float), launch.at_least(1e-9, float)
    add = parser.add_argument_group("measuring").add_argument
    sizes = "bytes, or 4K, 1M, 2G (default: 8 4K 256K 4M)"
    add("--sizes", type=num_bytes, nargs="+", default=[8, 4096, 2**18, 2**22], metavar="BYTES", help=sizes)
    add("--repetitions", type=size, default=15, help="timed calls of each operation and size")
    add("--warmup", type=launch.at_least(0), default=3, help="calls before those")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of the numbers that are sent")
    add = parser.add_argument_group("explaining").add_argument
    add("--explain", action="store_true", help="print what each operation does, with a picture")
    cost = "print what a broadcast to so many nodes would cost; without a number: 8"
    add("--simulate", type=launch.at_least(2), nargs="?", const=8, metavar="NODES", help=cost)
    add("--simulate_latency_s", type=real, default=0.0, help="of one message between two nodes")
    add("--simulate_gb", type=real, default=1.0, help="length of the message")
    add("--simulate_gb_per_s", type=positive, default=0.2, help="between two nodes")
    parser.add_run_flags()
    # What launch and Tracker read in scripts that train:
    parser.set_defaults(batch_size=0, gradient_accumulation_steps=1, log_with=None, resume=None)
    args = parser.parse_args()
    args.sizes = sorted(set(args.sizes))
    return args


class World(NamedTuple):
    """This process and the others. halves: the sub-groups; every process must make both, also the one it is not in."""

    rank: int
    n: int
    halves: list

    @property
    def right(self):
        return (self.rank + 1) % self.n

    @property
    def left(self):
        return (self.rank - 1) % self.n


# The operations. x: this process's input, float32 (count,), count a multiple of n; out: room for as much. Returns where
# the result is, or None on a process that gets none. The result may be in x itself.


def send_recv(x, out, world):
    """each passes its message on to the next; blocking, so that half of them must receive first
    0 [a]   [d] 0
    1 [b]   [a] 1      If all sent first, all would wait for a receiver for ever.
    2 [c]   [b] 2
    3 [d]   [c] 3"""
    if world.rank % 2 == 0:
        dist.send(x, world.right)
        dist.recv(out, world.left)
    else:
        dist.recv(out, world.left)
        dist.send(x, world.right)
    return out


def isend_irecv(x, out, world):
    """the same without blocking: both are on their way at once, and wait() says when they are there
    0 [a]   [d] 0
    1 [b]   [a] 1      Keep what isend returns until wait(): dropped, the message may never leave.
    2 [c]   [b] 2
    3 [d]   [c] 3"""
    operations = [dist.P2POp(dist.isend, x, world.right), dist.P2POp(dist.irecv, out, world.left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return out


def broadcast(x, out, world):
    """one process's message goes to all: weights at the start
    0 [a]   [a] 0
    1 [ ]   [a] 1
    2 [ ]   [a] 2
    3 [ ]   [a] 3"""
    dist.broadcast(x, src=0)
    return x


def reduce(x, out, world):
    """the sum of all, on one process: a metric to print
    0 [a]   [a+b+c+d] 0
    1 [b]   [?]       1      The others' tensors are left with partial sums: do not read them.
    2 [c]   [?]       2
    3 [d]   [?]       3"""
    dist.reduce(x, dst=0)
    return x if world.rank == 0 else None


def all_reduce(operation):
    def run(x, out, world):
        """the sum (or product, maximum, minimum, mean) of all, on all: gradients in data parallel training
        0 [a]   [a+b+c+d] 0
        1 [b]   [a+b+c+d] 1      = reduce_scatter, then all_gather
        2 [c]   [a+b+c+d] 2
        3 [d]   [a+b+c+d] 3"""
        dist.all_reduce(x, operation)
        return x

    return run


def gather(x, out, world):
    """one process gets the pieces of all: predictions to save
    0 [a]   [a b c d] 0
    1 [b]             1
    2 [c]             2
    3 [d]             3"""
    pieces = list(out.chunk(world.n)) if world.rank == 0 else None
    dist.gather(x.chunk(world.n)[world.rank], pieces)
    return out if world.rank == 0 else None


def scatter(x, out, world):
    """one process hands out pieces: data that only one can read
    0 [a b c d]   [a] 0
    1 [       ]   [b] 1
    2 [       ]   [c] 2
    3 [       ]   [d] 3"""
    mine = out.chunk(world.n)[0]
    dist.scatter(mine, list(x.chunk(world.n)) if world.rank == 0 else None)
    return mine


def all_gather(x, out, world):
    """all get the pieces of all: sharded weights (FSDP) before a layer runs
    0 [a]   [a b c d] 0
    1 [b]   [a b c d] 1
    2 [c]   [a b c d] 2
    3 [d]   [a b c d] 3"""
    dist.all_gather_into_tensor(out, x.chunk(world.n)[world.rank])
    return out


def reduce_scatter(x, out, world):
    """each gets one piece of the sum: gradients of sharded weights (FSDP)
    0 [a0 a1 a2 a3]   [a0+b0+c0+d0] 0
    1 [b0 b1 b2 b3]   [a1+b1+c1+d1] 1
    2 [c0 c1 c2 c3]   [a2+b2+c2+d2] 2
    3 [d0 d1 d2 d3]   [a3+b3+c3+d3] 3"""
    mine = out.chunk(world.n)[0]
    dist.reduce_scatter_tensor(mine, x)
    return mine


def all_to_all(x, out, world):
    """piece j of process i becomes piece i of process j, a transpose: tokens to their experts
    0 [a0 a1 a2 a3]   [a0 b0 c0 d0] 0
    1 [b0 b1 b2 b3]   [a1 b1 c1 d1] 1
    2 [c0 c1 c2 c3]   [a2 b2 c2 d2] 2
    3 [d0 d1 d2 d3]   [a3 b3 c3 d3] 3"""
    dist.all_to_all_single(out, x)
    return out


def new_group(x, out, world):
    """an all_reduce in each half of the processes, both at once: tensor parallel inside, data parallel across
    0 [a]   [a+b] 0
    1 [b]   [a+b] 1
    2 [c]   [c+d] 2      All must call new_group, in the same order, also for groups they are not in.
    3 [d]   [c+d] 3"""
    dist.all_reduce(x, group=world.halves[world.rank >= world.n // 2])
    return x


def broadcast_one_by_one(x, out, world):
    """a broadcast by hand: n - 1 messages, one after another, and only one process ever sends
    0 > 1,  0 > 2,  0 > 3,  0 > 4,  0 > 5,  0 > 6,  0 > 7"""
    if world.rank > 0:
        dist.recv(x, 0)
    else:
        for other in range(1, world.n):
            dist.send(x, other)
    return x


def broadcast_tree(x, out, world):
    """a broadcast by hand: who has the message helps to send it; each round doubles those who have it
    round 1: 0 > 1;  round 2: 0 > 2, 1 > 3;  round 3: 0 > 4, 1 > 5, 2 > 6, 3 > 7"""
    have = 1
    while have < world.n:
        if world.rank < have and world.rank + have < world.n:
            dist.send(x, world.rank + have)
        elif have <= world.rank < 2 * have:
            dist.recv(x, world.rank - have)
        have *= 2
    return x


def broadcast_ring(x, out, world):
    """a broadcast by hand: along a chain in n pieces; while the second goes 0 > 1, the first goes 1 > 2
    0 > 1 > 2 > 3 > 4 > 5 > 6 > 7"""
    sending = None
    for piece in x.chunk(world.n):
        if world.rank > 0:
            dist.recv(piece, world.left)
        if sending is not None:
            sending.wait()
        if world.rank < world.n - 1:
            sending = dist.isend(piece, world.right)
    if sending is not None:
        sending.wait()
    return x


class Operation(NamedTuple):
    """run: one of the functions above. expected(inputs, rank, n): its result, from the inputs of all, (n, count).

    bus_factor(n): by this the bandwidth S / t becomes that of the busiest wire, whatever n is (nccl-tests).
    exact: the result does not depend on the order of the additions.
    """

    run: callable
    expected: callable
    bus_factor: callable
    exact: bool = True


def once(n):
    return 1.0


def all_but_own(n):
    return (n - 1) / n


def there_and_back(n):
    return 2 * (n - 1) / n


def larger_half(n):
    return there_and_back((n + 1) // 2)


def own_pieces(inputs, n):
    return torch.cat([row.chunk(n)[sender] for sender, row in enumerate(inputs)])


def half_of(inputs, rank, n):
    return inputs[n // 2 :] if rank >= n // 2 else inputs[: n // 2]


Op = dist.ReduceOp
OPERATIONS = {
    "send/recv": Operation(send_recv, lambda x, rank, n: x[rank - 1], once),
    "isend/irecv": Operation(isend_irecv, lambda x, rank, n: x[rank - 1], once),
    "broadcast": Operation(broadcast, lambda x, rank, n: x[0], once),
    "reduce": Operation(reduce, lambda x, rank, n: x.sum(0) if rank == 0 else None, once),
    "all_reduce SUM": Operation(all_reduce(Op.SUM), lambda x, rank, n: x.sum(0), there_and_back),
    "all_reduce PRODUCT": Operation(all_reduce(Op.PRODUCT), lambda x, rank, n: x.prod(0), there_and_back),
    "all_reduce MAX": Operation(all_reduce(Op.MAX), lambda x, rank, n: x.amax(0), there_and_back),
    "all_reduce MIN": Operation(all_reduce(Op.MIN), lambda x, rank, n: x.amin(0), there_and_back),
    "all_reduce AVG": Operation(all_reduce(Op.AVG), lambda x, rank, n: x.mean(0), there_and_back, exact=False),
    "gather": Operation(gather, lambda x, rank, n: own_pieces(x, n) if rank == 0 else None, all_but_own),
    "scatter": Operation(scatter, lambda x, rank, n: x[0].chunk(n)[rank], all_but_own),
    "all_gather": Operation(all_gather, lambda x, rank, n: own_pieces(x, n), all_but_own),
    "reduce_scatter": Operation(reduce_scatter, lambda x, rank, n: x.sum(0).chunk(n)[rank], all_but_own),
    "all_to_all": Operation(all_to_all, lambda x, rank, n: torch.cat([r.chunk(n)[rank] for r in x]), all_but_own),
    "new_group": Operation(new_group, lambda x, rank, n: half_of(x, rank, n).sum(0), larger_half),
    "broadcast one by one": Operation(broadcast_one_by_one, lambda x, rank, n: x[0], once),
    "broadcast tree": Operation(broadcast_tree, lambda x, rank, n: x[0], once),
    "broadcast ring": Operation(broadcast_ring, lambda x, rank, n: x[0], once),
}


def explain() -> str:
    """The docstrings above, each once."""
    pictures = {}
    for name, operation in OPERATIONS.items():
        pictures.setdefault(inspect.cleandoc(operation.run.__doc__), []).append(name)
    return "\n\n".join(f"{', '.join(names)}: {picture}" for picture, names in pictures.items())


def message_length(size: int, n: int) -> int:
    """float32 numbers in a message of at least `size` bytes that n processes can share evenly."""
    return n * math.ceil(size / 4 / n)


def make_inputs(count: int, n: int, seed: int) -> torch.Tensor:
    """Numbers that each process knows of all, float32 (n, count), on the CPU.

    Powers of two from 1/4 to 4: their sums and products are exact in float32, in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-2, 3, (n, count), generator=generator)


def check(operation: Operation, inputs: torch.Tensor, world: World, device) -> str:
    """Run it once. What is wrong with this process's result; "" for nothing."""
    x = inputs[world.rank].to(device, copy=True)
    result = operation.run(x, torch.full_like(x, math.nan), world)
    expected = operation.expected(inputs, world.rank, world.n)
    if expected is None:
        return ""
    result = result.cpu()
    wrong = ~torch.isclose(result, expected, rtol=0 if operation.exact else 1e-6, atol=0)
    if not wrong.any():
        return ""
    at = int(wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {len(result)} numbers, [{at}] is {result[at]:g} and should be {expected[at]:g}"


def check_all(sizes: list[int], world: World, device, seed: int) -> tuple[list[str], set[str]]:
    """Every operation at every size: the wrong results in words, and the operations that the backend does not have."""
    wrong, unsupported = {}, set()
    for size in sizes:
        count = message_length(size, world.n)
        inputs = make_inputs(count, world.n, seed)
        for name, operation in OPERATIONS.items():
            if name in wrong or name in unsupported:
                continue
            try:
                verdict = check(operation, inputs, world, device)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if not NOT_SUPPORTED.search(str(error)):
                    error.add_note(f"this was {name} of {4 * count} bytes on rank {world.rank}")
                    raise
                verdict = "not supported"
            verdicts = share_verdicts(f"{name}/{size}", verdict)
            if "not supported" in verdicts:
                unsupported.add(name)
            elif any(verdicts):
                where = [f"on rank {rank} {said}" for rank, said in enumerate(verdicts) if said]
                wrong[name] = f"wrong result of {name}, {4 * count} bytes: {'; '.join(where)}"
    return list(wrong.values()), unsupported


def bandwidths(operation: Operation, size: int, time_s: float, n: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes); 0 where nothing is sent, in sub-groups of one.

    size: bytes of the whole message, which is what a process has after an all_gather, or before a reduce_scatter.
    """
    factor = operation.bus_factor(n)
    algorithm = size / time_s / 1e9 if factor else 0.0
    return algorithm, algorithm * factor


def time_all(args, world: World, device, unsupported: set[str]) -> list[dict]:
    """One row for each operation and size. A collective."""
    rows = []
    for name, operation in OPERATIONS.items():
        for size in args.sizes if name not in unsupported else ():
            x = torch.zeros(message_length(size, world.n), device=device)  # zeros stay zeros, however often added up
            out = torch.empty_like(x)
            times = timed(partial(operation.run, x, out, world), args.repetitions, args.warmup, device)
            time_s = statistics.median(times)
            algorithm, bus = bandwidths(operation, x.nbytes, time_s, world.n)
            row = {"operation": name, "bytes": x.nbytes, "time_us": time_s * 1e6}
            rows.append({**row, "algorithm_gb_per_s": algorithm, "bus_gb_per_s": bus})
    return rows


def table(rows: list[dict], unsupported: set[str], backend: str) -> str:
    """A line for each operation, with its time for each size, for people."""
    sizes = sorted({row["bytes"] for row in rows})
    lines = ["operation            " + "".join(f"{size:>10} B" for size in sizes) + "     alg GB/s  bus GB/s"]
    for name in OPERATIONS:
        mine = [row for row in rows if row["operation"] == name]
        if name in unsupported:
            lines.append(f"{name:<21} not supported by {backend}")
        else:
            times = "".join(f"{row['time_us']:>9,.0f} us" for row in mine)
            last = mine[-1]
            lines.append(f"{name:<21}{times}  {last['algorithm_gb_per_s']:>10.3f} {last['bus_gb_per_s']:>9.3f}")
    return "\n".join([*lines, "time of the smallest message: latency; bandwidths: of the largest message"])


def in_words(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} GiB"


def draw(rows: list[dict], pairs: dict, n: int, title: str, picture: Path) -> None:
    """A line for each operation: its time by size, and its bus bandwidth; and the bandwidth of each pair. A PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen and a font cache of its own
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(15, 6), layout="constrained")
    times, bandwidth, matrix = figure.subplots(1, 3, width_ratios=(5, 3, 5))
    names, sizes = list(dict.fromkeys(row["operation"] for row in rows)), sorted({row["bytes"] for row in rows})
    for at, size in enumerate(sizes):
        mine = [row for row in rows if row["bytes"] == size]
        style = {"color": colormaps["viridis"](0.95 * at / max(len(sizes) - 1, 1)), "label": in_words(size)}
        times.plot([row["time_us"] for row in mine], [names.index(row["operation"]) for row in mine], "o", **style)
    times.set(xscale="log", xlabel="µs", title="Time by size, slowest process")
    times.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.xaxis.set_major_formatter("{x:,.0f}")
    times.xaxis.set_minor_locator(NullLocator())
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower left", ncols=8)
    largest = [row["bus_gb_per_s"] for row in rows if row["bytes"] == sizes[-1]]
    bandwidth.bar_label(bandwidth.barh(names, largest, color="#0072b2"), fmt=" {:.2f}")
    bandwidth.set(xlabel="GB/s", title=f"Bus bandwidth, {in_words(sizes[-1])}", xlim=(0, 1.2 * max(largest)))
    for axes in (times, bandwidth):
        axes.set_yticks(range(len(names)), names if axes is times else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    cells = torch.full((n, n), math.nan)
    for (a, b), (_, bytes_per_s) in pairs.items():
        cells[a, b] = cells[b, a] = bytes_per_s / 1e9
    image = matrix.imshow(cells, vmin=0)
    matrix.set(xlabel="rank", ylabel="rank", title="Bandwidth of each pair, GB/s")
    for a, b in [*pairs, *(pair[::-1] for pair in pairs)] if n <= 8 else ():
        dark = cells[a, b] < 0.6 * cells.nan_to_num().max()
        matrix.text(b, a, f"{cells[a, b]:.2f}", ha="center", va="center", color="white" if dark else "black")
    matrix.set_xticks(range(n) if n <= 16 else [0, n - 1])
    matrix.set_yticks(range(n) if n <= 16 else [0, n - 1])
    figure.colorbar(image, ax=matrix, shrink=0.8)
    figure.suptitle(title)
    write(picture, lambda part: figure.savefig(part, dpi=110))


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    if args.explain:
        accelerator.print(explain(), end="\n\n")
    if args.simulate:
        textbook = args.simulate_gb * 1e9, args.simulate_latency_s, args.simulate_gb_per_s * 1e9
        accelerator.print(describe_simulation("textbook", args.simulate, *textbook), end="\n\n")
    n, device = accelerator.num_processes, accelerator.device
    if n == 1:
        accelerator.print("one process: there is nothing to send; accelerate_configs/cpu_ddp.yaml starts two")
        return accelerator.end_training()
    tracker = Tracker(accelerator, args)
    topology = launch.describe(accelerator)
    backend, hosts = topology["backend"], [process["host"] for process in topology["processes"]]
    halves = [dist.new_group(list(ranks)) for ranks in (range(n // 2), range(n // 2, n))]
    world = World(accelerator.process_index, n, halves)

    checked = [size for size in args.sizes if size * n <= CHECK_BYTES] or args.sizes[:1]
    wrong, unsupported = check_all(checked, world, device, args.seed)
    if wrong:
        if accelerator.is_local_main_process:
            print("\n".join(wrong), file=sys.stderr, flush=True)
        leave_together()
        sys.exit(1)
    machines = len(set(hosts))
    title = f"{n} processes on {machines} machine{'s' * (machines > 1)}, {device.type}, {backend}"
    accelerator.print(f"{title}: {len(OPERATIONS) - len(unsupported)} operations give the right results", flush=True)
    if len(checked) < len(args.sizes):
        accelerator.print(f"messages of more than {CHECK_BYTES // n:,} bytes are timed and not checked")
    rows = time_all(args, world, device, unsupported)
    pairs = time_pairs(args.repetitions, args.warmup, device)

    accelerator.print(table(rows, unsupported, backend), describe_pairs(pairs, hosts), sep="\n\n", flush=True)
    if args.simulate:
        largest = max(row["bytes"] for row in rows)
        accelerator.print("\n" + describe_simulation("this run", n, largest, *median_pair(pairs), rows))
    if accelerator.is_main_process:
        facts = {"arguments": vars(args), "command": sys.argv, "versions": versions(), "git_commit": git_commit()}
        write_json(tracker.folder / "run.json", {**facts, **topology})
        links = [
            {"ranks": pair, "hosts": [hosts[rank] for rank in pair], "latency_us": s * 1e6, "gb_per_s": speed / 1e9}
            for pair, (s, speed) in pairs.items()
        ]
        results = {"operations": rows, "not_supported": sorted(unsupported), "pairs": links}
        write_json(tracker.folder / "collectives.json", {**results, "slow_pairs": slow_pairs(pairs)})
        draw(rows, pairs, n, title, tracker.folder / "collectives.png")
        print(f"\ntable and picture in {tracker.folder}/collectives.json and .png", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
