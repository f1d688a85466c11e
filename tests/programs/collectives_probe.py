"""Has collectives.py check functions that are wrong on one rank, and time a link that is slow; prints what it finds."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "from_scratch"))

import network_timing

from scripts.from_scratch import collectives
from utils import launch

sys.argv = ["collectives.py", "--output_dir", "run", "--sizes", "8", "4K"]
sys.argv += ["--repetitions", "3", "--warmup", "1"]
args = collectives.parse_args()
accelerator = launch.make_accelerator(args)
rank, n, device = accelerator.process_index, accelerator.num_processes, accelerator.device
world = collectives.World(rank, n, [dist.new_group([0]), dist.new_group([1, 2])])
sizes = [1, 4096]  # fewer bytes than processes, and not a multiple of them


def say(case, text):
    if rank == 0:
        print(f"<{case}> {text}", flush=True)


def check(case):
    def share_verdicts(key, verdict):  # with keys of its own in the store
        return network_timing.share_verdicts(f"{case}/{key}", verdict)

    collectives.share_verdicts = share_verdicts
    wrong, unsupported = collectives.check_all(sizes, world, device, seed=0)
    collectives.share_verdicts = network_timing.share_verdicts
    say(case, f"{wrong} {sorted(unsupported)}")


def mutate(case, bad):
    name = case.split()[0]
    good = getattr(dist, name)
    setattr(dist, name, lambda *words, **options: bad(good, *words, **options))
    check(case)
    setattr(dist, name, good)


def off_by_one(at):
    """The right result, but one number of it is one too large on one rank."""

    def bad(good, tensor, *words, **options):
        result = good(tensor, *words, **options)
        if rank == at:
            (tensor[-1] if isinstance(tensor, list) else tensor)[-1] += 1
        return result

    return bad


def another_order(good, out, mine):
    good(out, mine)
    if rank == 1:
        out.copy_(out.flip(0))


check("all right")
mutate("all_reduce", off_by_one(1))
mutate("broadcast", lambda good, tensor, src: good(tensor, src=1))
mutate("reduce", lambda good, tensor, dst, op: good(tensor, 1, op))
mutate("reduce operation", lambda good, tensor, dst, op: good(tensor, dst, dist.ReduceOp.SUM))
mutate("gather", lambda good, tensor, pieces: good(tensor, pieces and pieces[::-1]))
mutate("scatter", off_by_one(2))
mutate("all_gather_into_tensor", another_order)
mutate("reduce_scatter_tensor", off_by_one(0))
mutate("all_to_all_single", lambda good, out, tensor: good(out, tensor.flip(0)))
mutate("recv", off_by_one(2))


def refuse(good, *words, **options):
    raise RuntimeError("ProcessGroupGloo does not support this")


mutate("reduce_scatter_tensor", refuse)

ping_pong = network_timing.ping_pong


def slow_link(message, first, second):
    if (first, second) == (1, 2):
        time.sleep(0.05)
    ping_pong(message, first, second)


network_timing.ping_pong = slow_link
pairs = network_timing.time_pairs(3, 1, device)
say("slow", network_timing.slow_pairs(pairs))
network_timing.ping_pong = ping_pong
say("slow one removed", (1, 2) in network_timing.slow_pairs({**pairs, (1, 2): pairs[0, 1]}))

good = dist.all_reduce
dist.all_reduce = lambda *words, **options: off_by_one(2)(good, *words, **options)
try:
    collectives.main()
except SystemExit as stopped:
    print(f"<exit {rank}> {stopped.code}\n", end="", flush=True)
    raise
