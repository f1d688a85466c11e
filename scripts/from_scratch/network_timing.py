"""The time of messages between processes: measured, for each pair of ranks, and in theory."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

LATENCY_BYTES = 8
BANDWIDTH_BYTES = 2**20
# A pair is slow if it is worse than the median of all pairs by these factors. With more processes than cores, the
# latencies of equal pairs differ by a factor of two.
SLOW_BANDWIDTH = 2.0
SLOW_LATENCY = 3.0


def share_verdicts(key: str, verdict: str) -> list[str]:
    """The `verdict` of every rank, under a `key` that is new and the same on all of them. Collective.

    It uses the launcher's store, because the collectives themselves are being tested.
    """
    store = dist.PrefixStore("verdicts", dist.group.WORLD.get_group_store())
    store.set(f"{key}/{dist.get_rank()}", verdict)
    return [store.get(f"{key}/{rank}").decode() for rank in range(dist.get_world_size())]


def leave_together() -> None:
    """Wait until all ranks have come here. Collective.

    A launcher kills the other processes as soon as one fails. Rank 0, which may hold the store, returns last.
    """
    share_verdicts("here", "")
    store = dist.PrefixStore("left", dist.group.WORLD.get_group_store())
    store.set(str(dist.get_rank()), "")
    if dist.get_rank() == 0:
        store.wait([str(rank) for rank in range(dist.get_world_size())])


def timed(call: Callable, repetitions: int, warmup: int, device: torch.device) -> list[float]:
    """Seconds of each call after the first `warmup`, on the slowest process. Collective.

    Each call starts at a barrier. On a GPU, the time includes waiting for the GPU to finish.
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
    """Rank `first` sends a message, and rank `second` sends it back."""
    rank = dist.get_rank()
    if rank == first:
        dist.send(message, second)
        dist.recv(message, second)
    elif rank == second:
        dist.recv(message, first)
        dist.send(message, first)


def time_pairs(repetitions: int, warmup: int, device: torch.device) -> dict[tuple[int, int], tuple[float, float]]:
    """Measure one pair of ranks after another. Collective.

    Returns:
        {(rank, rank): (latency in s, bandwidth in bytes/s)} of the fastest repetition, not the median: a busy process
        is late now and then, a slow link always.
    """
    pairs = {}
    for first, second in itertools.combinations(range(dist.get_world_size()), 2):
        one_way_s = []
        for size in (LATENCY_BYTES, BANDWIDTH_BYTES):
            there_and_back = partial(ping_pong, torch.zeros(size // 4, device=device), first, second)
            one_way_s.append(min(timed(there_and_back, repetitions, warmup, device)) / 2)
        latency_s, large_s = one_way_s
        pairs[first, second] = latency_s, BANDWIDTH_BYTES / large_s
    return pairs


def median_pair(pairs: dict) -> tuple[float, float]:
    """The median latency in s and the median bandwidth in bytes/s."""
    latencies, bandwidths = zip(*pairs.values(), strict=True)
    return statistics.median(latencies), statistics.median(bandwidths)


def slow_pairs(pairs: dict) -> list[tuple[int, int]]:
    """Pairs above three times the median latency, or below half the median bandwidth."""
    median_latency, median_bandwidth = median_pair(pairs)
    slow = []
    for pair, (latency, bandwidth) in pairs.items():
        is_late = latency > SLOW_LATENCY * median_latency
        is_narrow = bandwidth * SLOW_BANDWIDTH < median_bandwidth
        if is_late or is_narrow:
            slow.append(pair)
    return slow


def describe_pairs(pairs: dict, hosts: list[str]) -> str:
    """All pairs of up to 8 ranks, else the slow ones, with ranks and hosts."""
    latency, bandwidth = median_pair(pairs)
    lines = [f"pairs of ranks: median latency {latency * 1e6:.0f} us, bandwidth {bandwidth / 1e9:.3f} GB/s"]
    slow = slow_pairs(pairs)
    for (a, b), (latency, bandwidth) in pairs.items():
        is_slow = (a, b) in slow
        if len(hosts) <= 8 or is_slow:
            numbers = f"{latency * 1e6:.0f} us, {bandwidth / 1e9:.3f} GB/s"
            mark = "  SLOW" if is_slow else ""
            lines.append(f"  {a} ({hosts[a]}) - {b} ({hosts[b]}): {numbers}{mark}")
    if len(slow) > 1:
        for rank in sorted(set.intersection(*map(set, slow))):
            lines.append(f"  rank {rank} ({hosts[rank]}) is in all {len(slow)} slow pairs")
    if len(pairs) == 1:
        lines.append("  one pair: there is no other to compare it with")
    elif not slow:
        lines.append("  no slow pair")
    return "\n".join(lines)


def simulate_broadcast(n: int, num_bytes: float, latency_s: float, bytes_per_s: float) -> dict[str, tuple]:
    """How long it takes until all of `n` nodes have a message, in three ways.

    A message between two nodes takes latency_s + bytes / bytes_per_s, and a node sends one message at a time.

    - one by one: the first node sends n - 1 times.
    - tree: all nodes that have the message send it, so that their number doubles in each round.
    - ring: in n chunks along a chain. The last chunk starts after n - 1 others and passes n - 1 links.

    Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
    https://doi.org/10.1177/1094342005051521, without its cost of adding; the chain in chunks is the usual pipeline.

    Returns:
        {way: (rounds, seconds of a round, seconds in all)}
    """
    whole_s = latency_s + num_bytes / bytes_per_s
    chunk_s = latency_s + num_bytes / n / bytes_per_s
    rounds = {"one by one": (n - 1, whole_s), "tree": ((n - 1).bit_length(), whole_s), "ring": (2 * (n - 1), chunk_s)}
    return {way: (count, round_s, count * round_s) for way, (count, round_s) in rounds.items()}


def describe_simulation(
    title: str, n: int, num_bytes: float, latency_s: float, bytes_per_s: float, rows: Sequence[dict] = ()
) -> str:
    """`simulate_broadcast` as text.

    Args:
        rows: times measured by collectives.py; those of messages of `num_bytes` are shown beside the computed ones.
    """
    measured_s = {row["operation"]: row["time_us"] / 1e6 for row in rows if row["bytes"] == num_bytes}
    message_s = latency_s + num_bytes / bytes_per_s
    lines = [f"{title}: broadcast to {n} nodes; {num_bytes / 1e9:g} GB from one to another: {message_s:.4g} s"]
    ways = simulate_broadcast(n, num_bytes, latency_s, bytes_per_s)
    for way, (rounds, round_s, total_s) in ways.items():
        measured = f", measured {measured_s[f'broadcast {way}']:.4g} s" if measured_s else ""
        lines.append(f"  {way:<10} {rounds:>3} x {round_s:.4g} s = {total_s:.4g} s{measured}")
    both_s = {way: (1 if way == "ring" else 2) * total_s for way, (_, _, total_s) in ways.items()}
    reduce, all_reduce = "", ""
    if measured_s:
        reduce = f"; measured, tree: {measured_s['reduce tree']:.4g} s"
        all_reduce = f"; measured: {measured_s['all_reduce SUM']:.4g} s"
    lines.append(f"  a reduce takes as long as its broadcast, in reverse{reduce}")
    both = ", ".join(f"{way} {seconds:.4g} s" for way, seconds in both_s.items())
    lines.append(f"  an all-reduce needs both: {both}{all_reduce}")
    return "\n".join(lines)
