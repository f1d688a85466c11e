"""Helper of collectives.py: times of operations on all processes, and of messages between each pair of ranks."""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

LATENCY_BYTES = 8
BANDWIDTH_BYTES = 2**20
# A pair is slow if its bandwidth or latency is worse than the median of all pairs by these factors. With more processes
# than cores, the latencies of equal links differ by up to a factor of two.
SLOW_BANDWIDTH = 2.0
SLOW_LATENCY = 3.0


def share_verdicts(key: str, verdict: str) -> list[str]:
    """Exchange a string with all ranks. Collective.

    This uses the launcher's store, because the collectives themselves are being tested.

    Args:
        key: must be the same on all ranks, and different in each call.
        verdict: the string of this rank.

    Returns:
        The strings of all ranks.
    """
    store = dist.PrefixStore("verdicts", dist.group.WORLD.get_group_store())
    store.set(f"{key}/{dist.get_rank()}", verdict)
    return [store.get(f"{key}/{rank}").decode() for rank in range(dist.get_world_size())]


def leave_together() -> None:
    """Wait for all ranks, so that each can print its error before the launcher kills it. Collective.

    A launcher kills all processes as soon as one fails. Rank 0 returns last, because it may hold the store.
    """
    share_verdicts("before leaving", "")
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
        is slow in some repetitions, a slow link in all.
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
    """Pairs with more than three times the median latency, or less than half the median bandwidth."""
    median_latency, median_bandwidth = median_pair(pairs)
    slow = []
    for pair, (latency, bandwidth) in pairs.items():
        has_high_latency = latency > SLOW_LATENCY * median_latency
        has_low_bandwidth = bandwidth * SLOW_BANDWIDTH < median_bandwidth
        if has_high_latency or has_low_bandwidth:
            slow.append(pair)
    return slow


def describe_pairs(pairs: dict, hosts: list[str]) -> str:
    """One line per pair, with ranks and hosts; of more than 8 ranks, only the slow pairs."""
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
        lines.append("  one pair: no other pair to compare it with")
    elif not slow:
        lines.append("  no slow pair")
    return "\n".join(lines)
