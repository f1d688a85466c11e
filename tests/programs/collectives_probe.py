"""Has collectives.py check functions that are wrong on one rank, and time a slow link; prints the results."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "from_scratch"))

import network_timing

from scripts.from_scratch import collectives
from utils import launch

sys.argv = ["collectives.py", "--output_dir", "run", "--sizes", "8", "--repetitions", "3", "--warmup", "1"]
accelerator = launch.make_accelerator(collectives.parse_args())
rank, device = accelerator.process_index, accelerator.device
world = collectives.World(rank, 3, [dist.new_group([0]), dist.new_group([1, 2])])


def say(case, text):
    if rank == 0:
        print(f"<{case}> {text}", flush=True)


def check(case):
    def share_verdicts(key, verdict):  # the keys of the store must be new in each case
        return network_timing.share_verdicts(f"{case}/{key}", verdict)

    collectives.share_verdicts = share_verdicts
    # Sizes: fewer bytes than processes, and not a multiple of them.
    wrong, unsupported = collectives.check_all([1, 4096], world, device, seed=0)
    collectives.share_verdicts = network_timing.share_verdicts
    say(case, f"{wrong} {sorted(unsupported)}")


def mutate(case, name, mutant):
    original = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: mutant(original, *args, **kwargs))
    check(case)
    setattr(dist, name, original)


def off_by_one(wrong_rank):
    """A mutant whose result has one wrong number on one rank."""

    def mutant(original, tensor, *args, **kwargs):
        result = original(tensor, *args, **kwargs)
        if rank == wrong_rank:
            tensor[-1] += 1
        return result

    return mutant


def refuse(original, *args, **kwargs):
    raise RuntimeError("ProcessGroupGloo does not support this")


check("all right")
mutate("all_reduce", "all_reduce", off_by_one(1))
mutate("broadcast", "broadcast", lambda original, tensor, src: original(tensor, src=1))
mutate("reduce", "reduce", lambda original, tensor, dst, op: original(tensor, dst, dist.ReduceOp.SUM))
mutate("gather", "gather", lambda original, tensor, chunks: original(tensor, chunks and chunks[::-1]))
mutate("scatter", "scatter", off_by_one(2))
mutate("all_gather", "all_gather_into_tensor", off_by_one(1))
mutate("reduce_scatter", "reduce_scatter_tensor", off_by_one(0))
mutate("all_to_all", "all_to_all_single", lambda original, out, tensor: original(out, tensor.flip(0)))
mutate("recv", "recv", off_by_one(2))
mutate("not supported", "reduce_scatter_tensor", refuse)

ping_pong = network_timing.ping_pong


def slow_link(message, first, second):
    if (first, second) == (1, 2):
        time.sleep(0.05)
    ping_pong(message, first, second)


network_timing.ping_pong = slow_link
say("slow", network_timing.slow_pairs(network_timing.time_pairs(3, 1, device)))

all_reduce = dist.all_reduce
dist.all_reduce = lambda *args, **kwargs: off_by_one(2)(all_reduce, *args, **kwargs)
try:
    collectives.main()
except SystemExit as stopped:
    print(f"<exit {rank}> {stopped.code}\n", end="", flush=True)
    raise
