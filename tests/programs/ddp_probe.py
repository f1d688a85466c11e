"""Rings of 1 to N processes, and several runs of ddp.py in one launch; prints what they sent."""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.from_scratch import ddp
from utils import launch

FLAGS = sys.argv[1:]  # of all runs
sys.argv = ["ddp.py", "--output_dir", "unused", *FLAGS]
accelerator = launch.make_accelerator(ddp.parse_args())
rank, world_size = dist.get_rank(), dist.get_world_size()


def say(case, text):
    if rank == 0:
        print(f"<{case}> {text}", flush=True)


# Rings of 1, 2, 3, ... processes in one launch: the first n ranks take n for the world size.
for n in range(1, world_size + 1):
    for length in (0, 1, 2, 3, 5, 64, 1001):
        if rank < n:
            numbers = torch.arange(length, dtype=torch.float64)
            vectors = [numbers * (other + 1) + other for other in range(n)]
            tensor = vectors[rank].clone()
            dist.get_world_size = lambda n=n: n
            ddp.ring_all_reduce(tensor)
            assert torch.equal(tensor, sum(vectors)), (n, length, tensor)
        dist.get_world_size = lambda: world_size
        dist.barrier()
matrix = torch.full((3, 7), rank + 1.0)
ddp.ring_all_reduce(matrix)
dist.barrier()
say("ring", "equal" if (matrix == sum(range(1, world_size + 1))).all() else matrix)

# What is sent during the backward pass, and what after it.
sent = {True: 0, False: 0}
inside = [False]
backward, all_reduce = ddp.backward, dist.all_reduce


def watched_backward(*words, **options):
    inside[0] = True
    backward(*words, **options)
    inside[0] = False


def watched_all_reduce(*words, **options):
    sent[inside[0]] += 1
    return all_reduce(*words, **options)


def run(folder, *flags):
    sys.argv = ["ddp.py", "--output_dir", folder, *FLAGS, *flags]
    ddp.main()


# There are several runs in one launch.
end_group, dist.destroy_process_group = dist.destroy_process_group, lambda: None
run("all", "--delay", "2", "--local_steps", "3")
run("synchronous", "--algorithm", "local_sgd", "--local_steps", "1")
run("in time", "--algorithm", "stale", "--delay", "0")
ddp.backward, dist.all_reduce = watched_backward, watched_all_reduce
run("overlap", "--algorithm", "bucketed")
say("sent during backward", sent[True])
run("later than the end", "--algorithm", "stale", "--delay", "100")
gc.collect()  # a DDP model that is still alive keeps gloo's threads, which abort the exit
end_group()
