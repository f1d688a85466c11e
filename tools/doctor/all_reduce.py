"""Started by doctor --gpus, in one process per GPU: prints the speed of an all-reduce, and whether its sum is right.

    torchrun --standalone --nproc_per_node gpu tools/doctor/all_reduce.py nccl 20

After 20 s, without the imports, it prints "hangs" instead.
"""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist


def give_up():
    print("hangs", flush=True)
    os._exit(1)


backend, timeout_s = sys.argv[1], float(sys.argv[2])
timer = threading.Timer(timeout_s, give_up)
timer.start()
if backend == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(backend)
n, device = dist.get_world_size(), "cuda" if backend == "nccl" else "cpu"
count = 64 * 2**20 // 4 if backend == "nccl" else 2**20 // 4
times = []
for _ in range(4):
    x = torch.full((count,), float(dist.get_rank() + 1), device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(x)
    is_right = bool((x == n * (n + 1) / 2).all())  # also waits for the GPU
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print(json.dumps({"gb_per_s": 2 * (n - 1) / n * x.nbytes / min(times) / 1e9, "right": is_right}))
timer.cancel()
dist.destroy_process_group()
