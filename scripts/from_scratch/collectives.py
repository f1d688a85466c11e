"""Checks, times and draws each collective, to test a network before GPU-hours are spent on it.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/from_scratch/collectives.py \
        --explain --simulate
    accelerate launch --config_file accelerate_configs/multi_node.yaml scripts/from_scratch/collectives.py \
        --sizes 8 1M 256M

Every operation first runs on numbers whose result is known, on every process and at every size. A wrong result ends the
run with exit code 1 and the name of the operation. Then each is timed: a barrier, the call, the time of the slowest
process, the median of the repetitions. Gloo, 2 busy CPU cores, torch 2.15: 27 s, and 0.8 GB/s of bus bandwidth for an
all_reduce of 4 MiB between 2 processes; 43 s and 0.4 GB/s between 4.
Source of the bandwidths: nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import functools
import inspect
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import network_timing
from network_timing import leave_together, share_verdicts

from utils import flags, launch
from utils.atomic_files import write_json
from utils.console import plural
from utils.extras.banner import describe_topology
from utils.extras.curves import save_picture
from utils.run_folder import RunFolder

# A check makes the inputs of all processes. Sizes for which these take more are only timed.
CHECK_BYTES = 2**30
DTYPES = (torch.float32, torch.int32)
NOT_SUPPORTED = re.compile("not support|unsupported|cannot use|not implemented", re.IGNORECASE)
TAG = 7  # of the messages of recv_from_any
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def num_bytes(text: str) -> int:
    """8, 4K, 1M or 2G as a number: units of 1024, as in nccl-tests."""
    unit = text[-1:].upper()
    return flags.positive_int(text[:-1]) * UNITS[unit] if unit in UNITS else flags.positive_int(text)


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    sizes, what = [8, 2**12, 2**18, 2**22], "bytes, or 4K, 1M, 2G (default: 8 4K 256K 4M)"
    nodes = "print what a broadcast to NODES nodes costs in theory; without a number: 8"
    add = parser.add_argument_group("measuring").add_argument
    add("--sizes", type=num_bytes, nargs="+", default=sizes, metavar="BYTES", help=what)
    add("--repetitions", type=flags.positive_int, default=15, help="timed calls of each operation and size")
    add("--warmup", type=flags.non_negative_int, default=3, help="calls before the timed ones")
    add = parser.add_argument_group("explaining").add_argument
    add("--explain", action="store_true", help="print what each operation does, with a picture")
    add("--simulate", type=flags.at_least(2), nargs="?", const=8, metavar="NODES", help=nodes)
    add("--simulate_latency_s", type=flags.non_negative_float, default=0.0, help="seconds of a message without bytes")
    add("--simulate_gb", type=flags.non_negative_float, default=1.0, help="size of the message in GB")
    add("--simulate_gb_per_s", type=flags.at_least(1e-9, float), default=0.2, help="bandwidth between two nodes")
    parser.add_run_flags()
    args = parser.parse_args()
    args.sizes = sorted(set(args.sizes))
    return args


class World(NamedTuple):
    """This process and the others."""

    rank: int
    n: int  # world size
    halves: list  # sub-groups; every process must make both, also the one that it is not in

    @property
    def right(self):
        return (self.rank + 1) % self.n

    @property
    def left(self):
        return (self.rank - 1) % self.n


# The operations. Args: x, this process's input, (count,), float32 or int32, with a count that n divides; out, an
# uninitialised tensor like it. Each returns the tensor with the result, which may be x itself, or None on a process
# that gets no result.


def send_recv(x, out, world):
    """each sends a message to the next; the calls block, so half of the processes receive first
    0 [a]   [d] 0
    1 [b]   [a] 1      If all sent first, all would wait for a receiver forever.
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
    """the same without blocking: both messages travel at once; wait() returns when they are done
    0 [a]   [d] 0
    1 [b]   [a] 1      Keep what isend returns until wait(), or the message may never be sent.
    2 [c]   [b] 2
    3 [d]   [c] 3"""
    send = dist.P2POp(dist.isend, x, world.right)
    receive = dist.P2POp(dist.irecv, out, world.left)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return out


def broadcast(x, out, world):
    """one process sends its message to all: weights at the start
    0 [a]   [a] 0
    1 [ ]   [a] 1
    2 [ ]   [a] 2
    3 [ ]   [a] 3"""
    dist.broadcast(x, src=0)
    return x


def reduce(operation):
    def run(x, out, world):
        """the sum (product, ..., the bits that all or any have), on one process: a metric to print
        0 [a]   [a+b+c+d] 0
        1 [b]   [?]       1      The other tensors hold partial sums: do not read them.
        2 [c]   [?]       2
        3 [d]   [?]       3"""
        dist.reduce(x, 0, operation)
        return x if world.rank == 0 else None

    return run


def all_reduce(operation):
    def run(x, out, world):
        """the sum (product, maximum, minimum, mean) of all, on all: gradients in data parallelism
        0 [a]   [a+b+c+d] 0
        1 [b]   [a+b+c+d] 1      = reduce_scatter, then all_gather
        2 [c]   [a+b+c+d] 2
        3 [d]   [a+b+c+d] 3"""
        dist.all_reduce(x, operation)
        return x

    return run


def gather(x, out, world):
    """one process gets a chunk from each: predictions to save
    0 [a]   [a b c d] 0
    1 [b]             1
    2 [c]             2
    3 [d]             3"""
    chunks = list(out.chunk(world.n)) if world.rank == 0 else None
    dist.gather(x.chunk(world.n)[world.rank], chunks)
    return out if world.rank == 0 else None


def scatter(x, out, world):
    """one process sends a chunk to each: data that only one can read
    0 [a b c d]   [a] 0
    1 [       ]   [b] 1
    2 [       ]   [c] 2
    3 [       ]   [d] 3"""
    result = out.chunk(world.n)[0]
    dist.scatter(result, list(x.chunk(world.n)) if world.rank == 0 else None)
    return result


def all_gather(x, out, world):
    """all get a chunk from each: sharded weights (FSDP) before a layer runs
    0 [a]   [a b c d] 0
    1 [b]   [a b c d] 1
    2 [c]   [a b c d] 2
    3 [d]   [a b c d] 3"""
    dist.all_gather_into_tensor(out, x.chunk(world.n)[world.rank])
    return out


def reduce_scatter(x, out, world):
    """each gets one chunk of the sum: gradients of sharded weights (FSDP)
    0 [a0 a1 a2 a3]   [a0+b0+c0+d0] 0
    1 [b0 b1 b2 b3]   [a1+b1+c1+d1] 1
    2 [c0 c1 c2 c3]   [a2+b2+c2+d2] 2
    3 [d0 d1 d2 d3]   [a3+b3+c3+d3] 3"""
    result = out.chunk(world.n)[0]
    dist.reduce_scatter_tensor(result, x)
    return result


def all_to_all(x, out, world):
    """chunk j of process i becomes chunk i of process j, a transpose: tokens to their experts
    0 [a0 a1 a2 a3]   [a0 b0 c0 d0] 0
    1 [b0 b1 b2 b3]   [a1 b1 c1 d1] 1
    2 [c0 c1 c2 c3]   [a2 b2 c2 d2] 2
    3 [d0 d1 d2 d3]   [a3 b3 c3 d3] 3"""
    dist.all_to_all_single(out, x)
    return out


def new_group(x, out, world):
    """an all_reduce in each half of the processes, both at once: tensor parallelism in each half
    0 [a]   [a+b] 0
    1 [b]   [a+b] 1
    2 [c]   [c+d] 2      All processes must call new_group, in the same order, for both groups.
    3 [d]   [c+d] 3"""
    dist.all_reduce(x, group=world.halves[world.rank >= world.n // 2])
    return x


def broadcast_one_by_one(x, out, world):
    """a broadcast by hand: n - 1 messages, one after another, all from one process
    0 > 1,  0 > 2,  0 > 3,  0 > 4,  0 > 5,  0 > 6,  0 > 7"""
    if world.rank > 0:
        dist.recv(x, 0)
    else:
        for other in range(1, world.n):
            dist.send(x, other)
    return x


def broadcast_tree(x, out, world):
    """a broadcast by hand: all that have the message send it, so their number doubles each round
    round 1: 0 > 1;  round 2: 0 > 2, 1 > 3;  round 3: 0 > 4, 1 > 5, 2 > 6, 3 > 7"""
    have = 1
    while have < world.n:
        if world.rank < have and world.rank + have < world.n:
            dist.send(x, world.rank + have)
        elif have <= world.rank < 2 * have:
            dist.recv(x, world.rank - have)
        have *= 2
    return x


def reduce_tree(x, out, world):
    """a reduce by hand: in each round half of those that still have a sum send it to the others
    round 1: 1 > 0, 3 > 2, 5 > 4, 7 > 6;  round 2: 2 > 0, 6 > 4;  round 3: 4 > 0"""
    distance = 1
    while distance < world.n:
        if world.rank % (2 * distance) == distance:
            dist.send(x, world.rank - distance)
            return None  # the others go on without this process
        if world.rank + distance < world.n:
            dist.recv(out, world.rank + distance)
            x += out
        distance *= 2
    return x


def recv_from_any(x, out, world):
    """a gather by hand in the order of arrival: recv without a source returns the sender
    0 [a]   [a b c d] 0      A tag keeps messages of different kinds apart: this recv takes
    1 [b]             1      only those that were sent with its own.
    2 [c]             2
    3 [d]             3"""
    if dist.get_backend() == "nccl":  # it would raise on rank 0 alone, after the others have sent
        raise NotImplementedError("recv from any source is not supported by nccl")
    chunk, chunks = x.chunk(world.n)[world.rank], out.chunk(world.n)
    if world.rank > 0:
        dist.send(chunk, 0, tag=TAG)
        return None
    chunks[0].copy_(chunk)
    arriving = torch.empty_like(chunk)
    for _ in range(world.n - 1):
        sender = dist.recv(arriving, tag=TAG)
        chunks[sender].copy_(arriving)
    return out


def broadcast_ring(x, out, world):
    """a broadcast by hand: a chain of chunks; the second goes 0 > 1 while the first goes 1 > 2
    0 > 1 > 2 > 3 > 4 > 5 > 6 > 7"""
    sending = None
    for chunk in x.chunk(world.n):
        if world.rank > 0:
            dist.recv(chunk, world.left)
        if sending is not None:
            sending.wait()
        if world.rank < world.n - 1:
            sending = dist.isend(chunk, world.right)
    if sending is not None:
        sending.wait()
    return x


class Operation(NamedTuple):
    run: Callable  # one of the functions above
    expected: Callable  # expected(inputs, rank, n): the result of `rank` from the inputs of all, (n, count)
    bus_factor: Callable  # bus_factor(n): the bandwidth of the busiest link / (bytes / time), as in nccl-tests
    exact: bool = True  # the result does not depend on the order of the additions
    dtype: torch.dtype = torch.float32


def once(n):
    return 1.0


def all_but_own(n):
    return (n - 1) / n


def there_and_back(n):
    return 2 * (n - 1) / n


def larger_half(n):
    return there_and_back((n + 1) // 2)


def of_all(combine):
    """An expected result that is the same on every rank."""
    return lambda inputs, rank, n: combine(inputs)


def on_first(expected):
    """As `expected` on rank 0; no result on the others."""
    return lambda inputs, rank, n: expected(inputs, rank, n) if rank == 0 else None


def own_chunks(inputs, rank, n):
    """Chunk r of rank r, for all r."""
    return torch.cat([row.chunk(n)[sender] for sender, row in enumerate(inputs)])


def chunks_for_rank(inputs, rank, n):
    """Chunk `rank` of each rank."""
    return torch.cat([row.chunk(n)[rank] for row in inputs])


def from_left(inputs, rank, n):
    return inputs[rank - 1]


def chunk_of_first(inputs, rank, n):
    return inputs[0].chunk(n)[rank]


def chunk_of_total(inputs, rank, n):
    return inputs.sum(0).chunk(n)[rank]


def total_of_half(inputs, rank, n):
    return (inputs[n // 2 :] if rank >= n // 2 else inputs[: n // 2]).sum(0)


def reduce_int32(operation, operator):
    expected = of_all(functools.partial(functools.reduce, operator))
    return Operation(reduce(operation), on_first(expected), once, dtype=torch.int32)


from_first = of_all(lambda inputs: inputs[0])
total = of_all(lambda inputs: inputs.sum(0))
product = of_all(lambda inputs: inputs.prod(0))
maximum = of_all(lambda inputs: inputs.amax(0))
minimum = of_all(lambda inputs: inputs.amin(0))
mean = of_all(lambda inputs: inputs.mean(0))

Op = dist.ReduceOp
OPERATIONS = {
    "send/recv": Operation(send_recv, from_left, once),
    "isend/irecv": Operation(isend_irecv, from_left, once),
    "broadcast": Operation(broadcast, from_first, once),
    "reduce SUM": Operation(reduce(Op.SUM), on_first(total), once),
    "reduce PRODUCT": Operation(reduce(Op.PRODUCT), on_first(product), once),
    "reduce MAX": Operation(reduce(Op.MAX), on_first(maximum), once),
    "reduce MIN": Operation(reduce(Op.MIN), on_first(minimum), once),
    "reduce AVG": Operation(reduce(Op.AVG), on_first(mean), once, exact=False),
    "reduce BAND": reduce_int32(Op.BAND, torch.bitwise_and),
    "reduce BOR": reduce_int32(Op.BOR, torch.bitwise_or),
    "reduce BXOR": reduce_int32(Op.BXOR, torch.bitwise_xor),
    "all_reduce SUM": Operation(all_reduce(Op.SUM), total, there_and_back),
    "all_reduce PRODUCT": Operation(all_reduce(Op.PRODUCT), product, there_and_back),
    "all_reduce MAX": Operation(all_reduce(Op.MAX), maximum, there_and_back),
    "all_reduce MIN": Operation(all_reduce(Op.MIN), minimum, there_and_back),
    "all_reduce AVG": Operation(all_reduce(Op.AVG), mean, there_and_back, exact=False),
    "gather": Operation(gather, on_first(own_chunks), all_but_own),
    "scatter": Operation(scatter, chunk_of_first, all_but_own),
    "all_gather": Operation(all_gather, own_chunks, all_but_own),
    "reduce_scatter": Operation(reduce_scatter, chunk_of_total, all_but_own),
    "all_to_all": Operation(all_to_all, chunks_for_rank, all_but_own),
    "new_group": Operation(new_group, total_of_half, larger_half),
    "broadcast one by one": Operation(broadcast_one_by_one, from_first, once),
    "broadcast tree": Operation(broadcast_tree, from_first, once),
    "broadcast ring": Operation(broadcast_ring, from_first, once),
    "reduce tree": Operation(reduce_tree, on_first(total), once),
    "recv from any": Operation(recv_from_any, on_first(own_chunks), all_but_own),
}


def explain() -> str:
    """The docstrings above, each once."""
    pictures = {}
    for name, operation in OPERATIONS.items():
        pictures.setdefault(inspect.cleandoc(operation.run.__doc__), []).append(name)
    return "\n\n".join(f"{', '.join(names)}: {picture}" for picture, names in pictures.items())


def message_length(size: int, n: int) -> int:
    """Numbers of 4 bytes in a message of at least `size` bytes that divides into n chunks."""
    return n * math.ceil(size / 4 / n)


def make_inputs(count: int, n: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    """The inputs of all ranks, (n, count), on the CPU; the same numbers on every rank.

    float32: powers of two from 1/4 to 4, whose sums and products are exact in any order. int32: from 0 to 15, in which
    each bit is 0 as often as 1.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int32:
        return torch.randint(16, (n, count), generator=generator, dtype=dtype)
    return 2.0 ** torch.randint(-2, 3, (n, count), generator=generator)


def check(operation: Operation, inputs: torch.Tensor, world: World, device) -> str:
    """Run an operation once. Collective. Returns what is wrong with this rank's result; "" if it is right."""
    x = inputs[world.rank].to(device, copy=True)
    wrong_value = math.nan if x.is_floating_point() else -1
    result = operation.run(x, torch.full_like(x, wrong_value), world)
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
    """Check every operation at every size. Collective.

    Returns:
        A sentence for each wrong operation, and the names of the operations that the backend does not support.
    """
    wrong, unsupported = {}, set()
    for size in sizes:
        count = message_length(size, world.n)
        inputs = {dtype: make_inputs(count, world.n, seed, dtype) for dtype in DTYPES}
        for name, operation in OPERATIONS.items():
            if name in wrong or name in unsupported:
                continue
            try:
                verdict = check(operation, inputs[operation.dtype], world, device)
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
    """Algorithm and bus bandwidth in GB/s (1e9 bytes); 0 if nothing is sent, in groups of one.

    Args:
        size: bytes of the whole message, which a process has after an all_gather, or before a reduce_scatter.
    """
    factor = operation.bus_factor(n)
    algorithm = size / time_s / 1e9 if factor else 0.0
    return algorithm, algorithm * factor


def time_all(args, world: World, device, unsupported: set[str]) -> list[dict]:
    """One row for each operation and size. Collective."""
    rows = []
    for name, operation in OPERATIONS.items():
        for size in args.sizes if name not in unsupported else ():
            # Zeros stay zeros, however often they are added up.
            x = torch.zeros(message_length(size, world.n), dtype=operation.dtype, device=device)
            call = functools.partial(operation.run, x, torch.empty_like(x), world)
            time_s = statistics.median(network_timing.timed(call, args.repetitions, args.warmup, device))
            algorithm, bus = bandwidths(operation, x.nbytes, time_s, world.n)
            row = {"operation": name, "bytes": x.nbytes, "time_us": time_s * 1e6}
            rows.append({**row, "algorithm_gb_per_s": algorithm, "bus_gb_per_s": bus})
    return rows


def table(rows: list[dict], unsupported: set[str], backend: str) -> str:
    """One line for each operation, with its time for each size."""
    sizes = sorted({row["bytes"] for row in rows})
    columns = "".join(f"{size:>10} B" for size in sizes)
    lines = [f"operation            {columns}     alg GB/s  bus GB/s"]
    for name in OPERATIONS:
        if name in unsupported:
            lines.append(f"{name:<21} not supported by {backend}")
            continue
        chosen = [row for row in rows if row["operation"] == name]
        times = "".join(f"{row['time_us']:>9,.0f} us" for row in chosen)
        rates = f"{chosen[-1]['algorithm_gb_per_s']:>10.3f} {chosen[-1]['bus_gb_per_s']:>9.3f}"
        lines.append(f"{name:<21}{times}  {rates}")
    lines.append("latency: time of the smallest message; bandwidths: of the largest message")
    return "\n".join(lines)


def readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def draw(rows: list[dict], pairs: dict, n: int, title: str):
    """Each operation's time by size, its bus bandwidth, and the bandwidth of each pair of ranks."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    times, bandwidth, matrix = figure.subplots(1, 3, width_ratios=(5, 3, 5))
    names = list(dict.fromkeys(row["operation"] for row in rows))
    sizes = sorted({row["bytes"] for row in rows})
    for place, size in enumerate(sizes):
        times_us = [row["time_us"] for row in rows if row["bytes"] == size]
        colour = colormaps["viridis"](0.95 * place / max(len(sizes) - 1, 1))
        times.plot(times_us, range(len(names)), "o", color=colour, label=readable(size))
    times.set(xscale="log", xlabel="µs", title="Time by size, slowest process")
    times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=8)
    largest = [row["bus_gb_per_s"] for row in rows if row["bytes"] == sizes[-1]]
    bandwidth.bar_label(bandwidth.barh(names, largest, color="#0072b2"), fmt=" {:.2f}")
    bandwidth.set(xlabel="GB/s", title=f"Bus bandwidth, {readable(sizes[-1])}", xlim=(0, 1.2 * max(largest)))
    for axes in (times, bandwidth):
        axes.set_yticks(range(len(names)), names if axes is times else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    cells = torch.full((n, n), math.nan)
    for (a, b), (_, bytes_per_s) in pairs.items():
        cells[a, b] = cells[b, a] = bytes_per_s / 1e9
    ticks = range(n) if n <= 16 else [0, n - 1]
    matrix.set(xlabel="rank", ylabel="rank", title="Bandwidth of each pair, GB/s", xticks=ticks, yticks=ticks)
    figure.colorbar(matrix.imshow(cells, vmin=0), ax=matrix, shrink=0.8)
    figure.suptitle(title)
    return figure


def as_json(rows: list[dict], unsupported: set[str], pairs: dict) -> dict:
    """The results for run.json."""
    links = []
    for ranks, (latency_s, bytes_per_s) in pairs.items():
        links.append({"ranks": ranks, "latency_us": latency_s * 1e6, "gb_per_s": bytes_per_s / 1e9})
    slow = network_timing.slow_pairs(pairs)
    return {"operations": rows, "not_supported": sorted(unsupported), "pairs": links, "slow_pairs": slow}


def print_theory(args, accelerator):
    """What --explain and --simulate say without any other process."""
    if args.explain:
        accelerator.print(explain(), end="\n\n")
    if args.simulate:
        message = args.simulate_gb * 1e9, args.simulate_latency_s, args.simulate_gb_per_s * 1e9
        accelerator.print(network_timing.describe_simulation("in theory", args.simulate, *message), end="\n\n")


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    print_theory(args, accelerator)
    n, device = accelerator.num_processes, accelerator.device
    if n == 1:
        accelerator.print("one process: there is nothing to send; accelerate_configs/cpu_ddp.yaml starts two")
        return accelerator.end_training()
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # locked as long as it is referred to
    facts = describe_topology(accelerator)
    backend, hosts = facts["backend"], [process["host"] for process in facts["processes"]]
    halves = [dist.new_group(list(ranks)) for ranks in (range(n // 2), range(n // 2, n))]
    world = World(accelerator.process_index, n, halves)

    checked = [size for size in args.sizes if size * n <= CHECK_BYTES] or args.sizes[:1]
    wrong, unsupported = check_all(checked, world, device, args.seed)
    if wrong:
        if accelerator.is_local_main_process:
            print("\n".join(wrong), file=sys.stderr, flush=True)
        leave_together()
        sys.exit(1)
    title = f"{n} processes on {plural(len(set(hosts)), 'machine')}, {device.type}, {backend}"
    right = len(OPERATIONS) - len(unsupported)
    accelerator.print(f"{title}: {right} operations give the right results", flush=True)
    if len(checked) < len(args.sizes):
        accelerator.print(f"messages of more than {CHECK_BYTES // n:,} bytes are timed and not checked")

    rows = time_all(args, world, device, unsupported)
    pairs = network_timing.time_pairs(args.repetitions, args.warmup, device)
    accelerator.print(table(rows, unsupported, backend), end="\n\n")
    accelerator.print(network_timing.describe_pairs(pairs, hosts), flush=True)
    if args.simulate:
        largest, link = max(row["bytes"] for row in rows), network_timing.median_pair(pairs)
        accelerator.print("\n" + network_timing.describe_simulation("this run", n, largest, *link, rows))
    if accelerator.is_main_process:
        record = {"arguments": vars(args), **facts, "results": as_json(rows, unsupported, pairs)}
        write_json(folder.path / "run.json", record)
        save_picture(folder.path / "collectives.png", lambda: draw(rows, pairs, n, title))
        print(f"\ndone: numbers and a picture in {folder.path}/run.json and collectives.png", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
