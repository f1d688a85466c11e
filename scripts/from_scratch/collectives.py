"""Checks and times each collective operation, to test a network before GPU-hours are spent on it.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/from_scratch/collectives.py --explain
    accelerate launch --config_file accelerate_configs/multi_node.yaml scripts/from_scratch/collectives.py \
        --sizes 8 1M 256M

Each operation first runs on inputs whose result is known, on every process and with every size. If a result is wrong,
the run ends with exit code 1 and the name of the operation. Then each operation is timed: all processes start at a
barrier, the slowest one counts, and the table shows the median of the repetitions.
Gloo, 2 busy CPU cores, torch 2.15: an all_reduce of 4 MiB has a bus bandwidth of 0.8 GB/s between 2 processes, and of
0.4 GB/s between 4.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

import network_timing  # the file beside this one
from network_timing import leave_together, share_verdicts

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import plural
from utils.run_folder import RunFolder

# A check needs the inputs of all processes. Sizes at which they take more bytes than this are timed, but not checked.
CHECK_BYTES = 2**30
NOT_SUPPORTED = re.compile("not support|unsupported|cannot use|not implemented", re.IGNORECASE)
TAG = 7  # of the messages that recv_from_any receives
# The names since torch 2.14, which warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def num_bytes(text: str) -> int:
    """8, 4K, 1M or 2G as a number: units of 1024, as in nccl-tests."""
    unit = text[-1:].upper()
    return flags.positive_int(text[:-1]) * UNITS[unit] if unit in UNITS else flags.positive_int(text)


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--sizes",
        type=num_bytes,
        nargs="+",
        default=[8, 2**12, 2**18, 2**22],
        metavar="BYTES",
        help="bytes, or 4K, 1M, 2G (default: 8 4K 256K 4M)",
    )
    measuring.add_argument(
        "--repetitions", type=flags.positive_int, default=15, help="timed calls per operation and size"
    )
    measuring.add_argument("--warmup", type=flags.non_negative_int, default=3, help="calls before the timed ones")
    measuring.add_argument("--explain", action="store_true", help="print what each operation does, with a picture")
    parser.add_run_flags()
    args = parser.parse_args()
    args.sizes = sorted(set(args.sizes))
    return args


class World(NamedTuple):
    """This process and the others."""

    rank: int
    n: int  # world size
    halves: list  # sub-groups; every process must create both, also the one that it does not belong to

    @property
    def right(self):
        return (self.rank + 1) % self.n

    @property
    def left(self):
        return (self.rank - 1) % self.n


# The operations. Each gets x, this process's input: float32, of shape (count,), where count is a multiple of n; and
# out, an uninitialised tensor of the same shape. It returns the tensor with the result, which may be x itself, or None
# on a process that gets no result.


def send_recv(x, out, world):
    """each process sends a message to the next; the calls block, so every second process receives first
    0 [a]   [d] 0
    1 [b]   [a] 1      If all sent first, all could wait for a receiver forever.
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
    """the same without blocking: both messages travel at once; wait() returns when they have arrived
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
    """one process sends its message to all: the weights at the start of training
    0 [a]   [a] 0
    1 [ ]   [a] 1
    2 [ ]   [a] 2
    3 [ ]   [a] 3"""
    dist.broadcast(x, src=0)
    return x


def reduce(operation):
    def run(x, out, world):
        """the sum (product, minimum, maximum, mean), on one process: a metric to print
        0 [a]   [a+b+c+d] 0
        1 [b]   [?]       1      The other tensors hold partial sums: do not read them.
        2 [c]   [?]       2
        3 [d]   [?]       3"""
        dist.reduce(x, 0, operation)
        return x if world.rank == 0 else None

    return run


def all_reduce(operation):
    def run(x, out, world):
        """the sum (product, minimum, maximum, mean), on all processes: gradients in data parallelism
        0 [a]   [a+b+c+d] 0
        1 [b]   [a+b+c+d] 1      = reduce_scatter, then all_gather
        2 [c]   [a+b+c+d] 2
        3 [d]   [a+b+c+d] 3"""
        dist.all_reduce(x, operation)
        return x

    return run


def gather(x, out, world):
    """one process gets a chunk from each process: predictions to save
    0 [a]   [a b c d] 0
    1 [b]             1
    2 [c]             2
    3 [d]             3"""
    chunks = list(out.chunk(world.n)) if world.rank == 0 else None
    dist.gather(x.chunk(world.n)[world.rank], chunks)
    return out if world.rank == 0 else None


def scatter(x, out, world):
    """one process sends a chunk to each process: data that only one can read
    0 [a b c d]   [a] 0
    1 [       ]   [b] 1
    2 [       ]   [c] 2
    3 [       ]   [d] 3"""
    result = out.chunk(world.n)[0]
    dist.scatter(result, list(x.chunk(world.n)) if world.rank == 0 else None)
    return result


def all_gather(x, out, world):
    """all processes get a chunk from each: sharded weights (FSDP) before a layer runs
    0 [a]   [a b c d] 0
    1 [b]   [a b c d] 1
    2 [c]   [a b c d] 2
    3 [d]   [a b c d] 3"""
    all_gather_single(out, x.chunk(world.n)[world.rank])
    return out


def reduce_scatter(x, out, world):
    """each process gets one chunk of the sum: gradients of sharded weights (FSDP)
    0 [a0 a1 a2 a3]   [a0+b0+c0+d0] 0
    1 [b0 b1 b2 b3]   [a1+b1+c1+d1] 1
    2 [c0 c1 c2 c3]   [a2+b2+c2+d2] 2
    3 [d0 d1 d2 d3]   [a3+b3+c3+d3] 3"""
    result = out.chunk(world.n)[0]
    reduce_scatter_single(result, x)
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
    2 [c]   [c+d] 2      All processes must call new_group for both groups, in the same order.
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
    """a broadcast by hand: all that have the message send it, so their number doubles in each round
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
    """a reduce by hand: in each round, half of the processes that hold a sum send it to the other half
    round 1: 1 > 0, 3 > 2, 5 > 4, 7 > 6;  round 2: 2 > 0, 6 > 4;  round 3: 4 > 0"""
    distance = 1
    while distance < world.n:
        if world.rank % (2 * distance) == distance:
            dist.send(x, world.rank - distance)
            return None  # the other processes continue
        if world.rank + distance < world.n:
            dist.recv(out, world.rank + distance)
            x += out
        distance *= 2
    return x


def recv_from_any(x, out, world):
    """a gather by hand in the order of arrival: recv without a source returns the sender
    0 [a]   [a b c d] 0      A tag keeps messages of different kinds apart: this recv takes
    1 [b]             1      only messages that were sent with the same tag.
    2 [c]             2
    3 [d]             3"""
    if dist.get_backend() == "nccl":  # recv would raise on rank 0 only, after the others have sent
        raise NotImplementedError("recv from any source is not supported by nccl")
    chunk, chunks = x.chunk(world.n)[world.rank], out.chunk(world.n)
    if world.rank > 0:
        dist.send(chunk, 0, tag=TAG)
        return None
    chunks[0].copy_(chunk)
    received = torch.empty_like(chunk)
    for _ in range(world.n - 1):
        sender = dist.recv(received, tag=TAG)
        chunks[sender].copy_(received)
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
    expected: Callable  # expected(inputs, rank, n): the result on `rank`, given the inputs of all ranks, (n, count)
    bus_factor: Callable = lambda n: 1.0  # bus_factor(n): bus bandwidth / (bytes / time), as in nccl-tests
    exact: bool = True  # the result does not depend on the order of the additions


def one_chunk_less(n):
    return (n - 1) / n


def ring_factor(n):
    return 2 * (n - 1) / n


def all_ranks(combine):
    """An expected result that is the same on every rank."""
    return lambda inputs, rank, n: combine(inputs)


def rank_0_only(expected):
    """As `expected` on rank 0; no result on the others."""
    return lambda inputs, rank, n: expected(inputs, rank, n) if rank == 0 else None


def gathered(inputs, rank, n):
    """Chunk r of rank r, for all r."""
    return torch.cat([row.chunk(n)[sender] for sender, row in enumerate(inputs)])


def transposed(inputs, rank, n):
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


first = all_ranks(lambda inputs: inputs[0])
total = all_ranks(lambda inputs: inputs.sum(0))
product = all_ranks(lambda inputs: inputs.prod(0))
minimum = all_ranks(lambda inputs: inputs.amin(0))
maximum = all_ranks(lambda inputs: inputs.amax(0))
mean = all_ranks(lambda inputs: inputs.mean(0))

Op = dist.ReduceOp
OPERATIONS = {
    "send/recv": Operation(send_recv, from_left),
    "isend/irecv": Operation(isend_irecv, from_left),
    "broadcast": Operation(broadcast, first),
    "reduce SUM": Operation(reduce(Op.SUM), rank_0_only(total)),
    "reduce PRODUCT": Operation(reduce(Op.PRODUCT), rank_0_only(product)),
    "reduce MIN": Operation(reduce(Op.MIN), rank_0_only(minimum)),
    "reduce MAX": Operation(reduce(Op.MAX), rank_0_only(maximum)),
    "reduce AVG": Operation(reduce(Op.AVG), rank_0_only(mean), exact=False),
    "all_reduce SUM": Operation(all_reduce(Op.SUM), total, ring_factor),
    "all_reduce PRODUCT": Operation(all_reduce(Op.PRODUCT), product, ring_factor),
    "all_reduce MIN": Operation(all_reduce(Op.MIN), minimum, ring_factor),
    "all_reduce MAX": Operation(all_reduce(Op.MAX), maximum, ring_factor),
    "all_reduce AVG": Operation(all_reduce(Op.AVG), mean, ring_factor, exact=False),
    "gather": Operation(gather, rank_0_only(gathered), one_chunk_less),
    "scatter": Operation(scatter, chunk_of_first, one_chunk_less),
    "all_gather": Operation(all_gather, gathered, one_chunk_less),
    "reduce_scatter": Operation(reduce_scatter, chunk_of_total, one_chunk_less),
    "all_to_all": Operation(all_to_all, transposed, one_chunk_less),
    "new_group": Operation(new_group, total_of_half, lambda n: ring_factor((n + 1) // 2)),
    "broadcast one by one": Operation(broadcast_one_by_one, first),
    "broadcast tree": Operation(broadcast_tree, first),
    "broadcast ring": Operation(broadcast_ring, first),
    "reduce tree": Operation(reduce_tree, rank_0_only(total)),
    "recv from any": Operation(recv_from_any, rank_0_only(gathered), one_chunk_less),
}


def explain() -> str:
    """The docstring of each operation, with its names."""
    pictures = {}
    for name, operation in OPERATIONS.items():
        pictures.setdefault(inspect.cleandoc(operation.run.__doc__), []).append(name)
    return "\n\n".join(f"{', '.join(names)}: {picture}" for picture, names in pictures.items())


def message_length(size: int, n: int) -> int:
    """How many float32 numbers make a message of at least `size` bytes that n equal chunks divide."""
    return n * math.ceil(size / 4 / n)


def make_inputs(count: int, n: int, seed: int) -> torch.Tensor:
    """The inputs of all ranks, (n, count), on the CPU; the same numbers on every rank.

    They are powers of two from 1/4 to 4, whose sum and product are exact in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-2, 3, (n, count), generator=generator)


def check(operation: Operation, inputs: torch.Tensor, world: World, device) -> str:
    """Run an operation once. Collective.

    Returns:
        A description of the error in this rank's result; "" if the result is right.
    """
    x = inputs[world.rank].to(device, copy=True)
    result = operation.run(x, torch.full_like(x, math.nan), world)
    expected = operation.expected(inputs, world.rank, world.n)
    if expected is None:
        return ""
    result = result.cpu()
    wrong = ~torch.isclose(result, expected, rtol=0 if operation.exact else 1e-6, atol=0)
    if not wrong.any():
        return ""
    i = int(wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {len(result)} numbers, [{i}] is {result[i]:g} and should be {expected[i]:g}"


def check_all(sizes: list[int], world: World, device, seed: int) -> tuple[list[str], set[str]]:
    """Check every operation with every size. Collective.

    Returns:
        An error message for each wrong operation, and the names of the operations that the backend does not support.
    """
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
                    error.add_note(f"raised by {name} of {4 * count} bytes on rank {world.rank}")
                    raise
                verdict = "not supported"
            verdicts = share_verdicts(f"{name}/{size}", verdict)
            if "not supported" in verdicts:
                unsupported.add(name)
            elif any(verdicts):
                errors = [f"on rank {rank} {error}" for rank, error in enumerate(verdicts) if error]
                wrong[name] = f"wrong result of {name}, {4 * count} bytes: {'; '.join(errors)}"
    return list(wrong.values()), unsupported


def time_all(args, world: World, device, unsupported: set[str]) -> list[dict]:
    """One row for each operation and size. Collective."""
    rows = []
    for name, operation in OPERATIONS.items():
        for size in args.sizes if name not in unsupported else ():
            x = torch.zeros(message_length(size, world.n), device=device)  # repeated sums of zeros do not overflow
            call = functools.partial(operation.run, x, torch.empty_like(x), world)
            time_s = statistics.median(network_timing.timed(call, args.repetitions, args.warmup, device))
            bus_gb_per_s = operation.bus_factor(world.n) * x.nbytes / time_s / 1e9
            rows.append({"operation": name, "bytes": x.nbytes, "time_us": time_s * 1e6, "bus_gb_per_s": bus_gb_per_s})
    return rows


def table(rows: list[dict], unsupported: set[str], backend: str) -> str:
    """One line for each operation, with its time for each size."""
    sizes = sorted({row["bytes"] for row in rows})
    columns = "".join(f"{size:>10} B" for size in sizes)
    lines = [f"operation            {columns}  bus GB/s"]
    for name in OPERATIONS:
        if name in unsupported:
            lines.append(f"{name:<21} not supported by {backend}")
            continue
        chosen = [row for row in rows if row["operation"] == name]
        times = "".join(f"{row['time_us']:>9,.0f} us" for row in chosen)
        lines.append(f"{name:<21}{times} {chosen[-1]['bus_gb_per_s']:>9.3f}")
    lines.append("us: microseconds per call with a message of this many bytes; bus GB/s: for the largest message")
    return "\n".join(lines)


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    if args.explain:
        accelerator.print(explain(), end="\n\n")
    n, device = accelerator.num_processes, accelerator.device
    if n == 1:
        accelerator.print("one process has nothing to send: accelerate_configs/cpu_ddp.yaml starts two")
        return accelerator.end_training()
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
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
        accelerator.print(f"messages of more than {CHECK_BYTES // n:,} bytes are timed, but not checked")

    rows = time_all(args, world, device, unsupported)
    accelerator.print(table(rows, unsupported, backend), end="\n\n", flush=True)
    pairs = network_timing.time_pairs(args.repetitions, args.warmup, device)
    accelerator.print(network_timing.describe_pairs(pairs, hosts), flush=True)
    if accelerator.is_main_process:
        write_json(folder.path / "run.json", {"arguments": vars(args), **facts, "results": rows})
    accelerator.end_training()


if __name__ == "__main__":
    main()
