"""What `doctor --gpus` measures: products of matrices, copies between GPUs, and an all-reduce that may hang."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tools.doctor.data_sheets import peak_tflops
from utils.console import plural

PROGRAM = Path(__file__).with_name("all_reduce.py")
TIMEOUT_S = 20  # of an all-reduce
START_S = 100  # within which its processes have started
MIB = 2**20
LEAST = 0.4  # of the data sheet, below which a card is slow: hot, shared, or with a power limit


def devices(stand_ins: int) -> list[torch.device]:
    """All GPUs; or as often the CPU."""
    if stand_ins:
        return [torch.device("cpu")] * stand_ins
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def seconds(call, *used: torch.device) -> float:
    """The fastest of five calls, after one for warm-up."""

    def synchronize():
        for device in used:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    times = []
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def product_tflops(device: torch.device) -> float:
    """TFLOP/s of a product of matrices, in fp16 on a GPU."""
    n, dtype = (8192, torch.float16) if device.type == "cuda" else (512, torch.float32)
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / seconds(lambda: a @ a, device) / 1e12


def copy_gb_per_s(source: torch.device, target: torch.device) -> float:
    x = torch.zeros((256 if source.type == "cuda" else 16) * MIB, dtype=torch.uint8, device=source)
    y = torch.empty_like(x, device=target)
    return x.nbytes / seconds(lambda: y.copy_(x), source, target) / 1e9


def all_reduce(count: int, backend: str, **variables: str) -> dict | str:
    """Sum a tensor over `count` processes, one per GPU.

    Returns:
        "gb_per_s", the bus bandwidth, and "right"; or why there is no result: "hangs", or the last line of the error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    process = subprocess.Popen(
        [*command, str(PROGRAM), backend, str(TIMEOUT_S)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=START_S + TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hangs"
    if "hangs" in out:
        return "hangs"
    if process.returncode:
        return next((line for line in reversed(error.splitlines()) if "Error" in line), f"exit {process.returncode}")
    return json.loads(out.splitlines()[-1])


def check(stand_ins: int = 0) -> Iterator[tuple[str, str]]:
    """Measure, and yield the lines of the report: (kind, sentence), where kind is "", "warning" or "error"."""
    found = devices(stand_ins)
    if not found:
        yield "error", "torch sees no GPU; --stand_ins 2 tries this program out on the CPU"
        return
    for index, device in enumerate(found):
        name, tflops, peak = name_of(device), product_tflops(device), peak_tflops(name_of(device))
        line = f"GPU {index}, {name}: {tflops:.3g} TFLOP/s"
        if peak is None:
            yield "", f"{line}; its data sheet is not known here"
        elif tflops < LEAST * peak:
            yield "warning", f"{line}, {tflops / peak:.0%} of {peak:g}: it is hot, shared, or has a power limit"
        else:
            yield "", f"{line}, {tflops / peak:.0%} of {peak:g}"
    for (i, source), (j, target) in itertools.permutations(enumerate(found), 2):
        direct = source.type == "cuda" and torch.cuda.can_device_access_peer(source, target)
        way = "direct" if direct else "through the memory of the host"
        yield "", f"GPU {i} to {j}: {copy_gb_per_s(source, target):.3g} GB/s, {way}"
    if len(found) == 1:
        return
    yield from check_all_reduce(len(found), "gloo" if stand_ins else "nccl")


def check_all_reduce(count: int, backend: str) -> Iterator[tuple[str, str]]:
    """An all-reduce; if it fails, once more without direct copies between GPUs."""
    what = f"all-reduce over {plural(count, 'GPU')}, {backend}"
    result = all_reduce(count, backend)
    if isinstance(result, dict):
        yield ("" if result["right"] else "error"), describe(what, result)
        return
    failed = f"hangs for {TIMEOUT_S} s" if result == "hangs" else f"fails: {result}"
    again = all_reduce(count, backend, NCCL_P2P_DISABLE="1")
    if isinstance(again, dict) and again["right"]:
        advice = "set NCCL_P2P_DISABLE=1 in the environment of every run on this machine"
        yield "error", f"{what} {failed}. {describe('With NCCL_P2P_DISABLE=1 it works', again)}: {advice}"
    else:
        yield "error", f"{what} {failed}, also with NCCL_P2P_DISABLE=1. NCCL_DEBUG=INFO prints why"


def describe(what: str, result: dict) -> str:
    return f"{what}: {result['gb_per_s']:.3g} GB/s{'' if result['right'] else ', and the sum is WRONG'}"
