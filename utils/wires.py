"""Messages between processes: their time as measured, by pair of processes and by the textbook."""

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

PAIR_BYTES = 2**20  # sent for the bandwidth of a pair; 8 bytes for its latency
# A pair is slow by these multiples of the median of all pairs. With more processes than cores, the latencies of pairs
# that are all alike differ by a factor of two.
SLOW_BANDWIDTH, SLOW_LATENCY = 2.0, 3.0


def share_verdicts(key: str, verdict: str) -> list[str]:
    """What each process says, by the store that the job was started with: the collectives are under test themselves."""
    store = dist.PrefixStore("verdicts", dist.group.WORLD.get_group_store())
    store.set(f"{key}/{dist.get_rank()}", verdict)
    return [store.get(f"{key}/{rank}").decode() for rank in range(dist.get_world_size())]


def leave_together() -> None:
    """No process ends before all have come here, since a launcher kills the others as soon as one fails.

    Rank 0, which may hold the store, ends last.
    """
    share_verdicts("here", "")
    store = dist.PrefixStore("left", dist.group.WORLD.get_group_store())
    store.set(str(dist.get_rank()), "")
    if dist.get_rank() == 0:
        store.wait([str(rank) for rank in range(dist.get_world_size())])


def timed(call: Callable, repetitions: int, warmup: int, device: torch.device) -> list[float]:
    """Seconds of each call after the first `warmup`, each the slowest process's. A collective.

    The calls start from a barrier, and a GPU's time is waited for.
    """
    times = []
    for _ in range(warmup + repetitions):
        dist.barrier()
        started = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - started)
    times = torch.tensor(times[warmup:], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def ping_pong(message: torch.Tensor, first: int, second: int) -> None:
    """Rank `first` sends, `second` sends it back. All that is measured of a pair goes through here."""
    rank = dist.get_rank()
    if rank == first:
        dist.send(message, second)
        dist.recv(message, second)
    elif rank == second:
        dist.recv(message, first)
        dist.send(message, first)


def time_pairs(repetitions: int, warmup: int, device: torch.device) -> dict[tuple[int, int], tuple[float, float]]:
    """{(rank, rank): (latency in s, bandwidth in bytes/s)}, one pair after another. A collective.

    The best of the repetitions and not the median: a busy process is late now and then, a slow wire always.
    """
    messages = [torch.zeros(num_bytes // 4, device=device) for num_bytes in (8, PAIR_BYTES)]
    pairs = {}
    for pair in itertools.combinations(range(dist.get_world_size()), 2):
        one_way = [
            min(timed(lambda message=message, pair=pair: ping_pong(message, *pair), repetitions, warmup, device)) / 2
            for message in messages
        ]
        pairs[pair] = one_way[0], PAIR_BYTES / one_way[1]
    return pairs


def median_pair(pairs: dict) -> tuple[float, float]:
    """The median latency in s and the median bandwidth in bytes/s."""
    latencies, bandwidths = zip(*pairs.values(), strict=True)
    return statistics.median(latencies), statistics.median(bandwidths)


def slow_pairs(pairs: dict) -> list[tuple[int, int]]:
    """Pairs with more than three times the median latency, or less than half the median bandwidth."""
    latency, bandwidth = median_pair(pairs)
    return [
        pair for pair, (s, speed) in pairs.items() if s > SLOW_LATENCY * latency or speed * SLOW_BANDWIDTH < bandwidth
    ]


def describe_pairs(pairs: dict, hosts: list[str]) -> str:
    """Every pair of up to 8 processes, and the slow ones by rank and host."""
    latency, bandwidth = median_pair(pairs)
    lines = [f"pairs of ranks: median latency {latency * 1e6:.0f} us, bandwidth {bandwidth / 1e9:.3f} GB/s"]
    slow = slow_pairs(pairs)
    for (a, b), (mine, my_bandwidth) in pairs.items():
        if len(hosts) <= 8 or (a, b) in slow:
            text = f"  {a} ({hosts[a]}) - {b} ({hosts[b]}): {mine * 1e6:.0f} us, {my_bandwidth / 1e9:.3f} GB/s"
            lines.append(text + "  SLOW" * ((a, b) in slow))
    shared = set.intersection(*map(set, slow)) if len(slow) > 1 else set()
    lines += [f"  rank {rank} ({hosts[rank]}) is in all {len(slow)} slow pairs" for rank in shared]
    if len(pairs) == 1:
        lines.append("  one pair: there is no other to call it slow by")
    elif not slow:
        lines.append("  no slow pair")
    return "\n".join(lines)


def simulate_broadcast(
    n: int, num_bytes: float, latency_s: float, bytes_per_s: float
) -> dict[str, tuple[int, float, float]]:
    """{way: (rounds, seconds of a round, seconds in all)} until all of n nodes have a message.

    A message between two nodes takes latency_s + bytes / bytes_per_s, and a node sends one at a time.
    One by one: the first node sends n-1 times. Tree: all that have it send, so that they double in each round. Ring:
    in n pieces along a chain; the last piece starts after n-1 others and passes n-1 wires. An all-reduce on a ring
    takes as many rounds of a piece, 2 (n-1); one by one and by a tree it takes twice the broadcast (first a reduce).

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
    https://doi.org/10.1177/1094342005051521, without its cost of adding; the chain in pieces is the usual pipeline.
    """
    whole, piece = (latency_s + num_bytes / pieces / bytes_per_s for pieces in (1, n))
    ways = {"one by one": (n - 1, whole), "tree": ((n - 1).bit_length(), whole), "ring": (2 * (n - 1), piece)}
    return {way: (rounds, round_s, rounds * round_s) for way, (rounds, round_s) in ways.items()}


def describe_simulation(title: str, n: int, num_bytes: float, latency_s: float, bytes_per_s: float, rows=()) -> str:
    """What a broadcast costs, and beside it what it took in this run, if `rows` has that size."""
    took = {row["operation"]: row["time_us"] / 1e6 for row in rows if row["bytes"] == num_bytes}
    message_s = latency_s + num_bytes / bytes_per_s
    lines = [f"{title}: broadcast to {n} nodes; {num_bytes / 1e9:g} GB from one to another: {message_s:.4g} s"]
    for way, (rounds, round_s, total_s) in simulate_broadcast(n, num_bytes, latency_s, bytes_per_s).items():
        measured = f", measured {took[f'broadcast {way}']:.4g} s" if took else ""
        lines.append(f"  {way:<10} {rounds:>3} x {round_s:.4g} s = {total_s:.4g} s{measured}")
    return "\n".join(lines)
