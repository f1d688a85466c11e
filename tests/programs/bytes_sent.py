"""How many bytes a process sends in a step of ResNet-50: DDP, accumulation, and a pipeline of two stages.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml tests/programs/bytes_sent.py

The same batch in the same micro-batches each time; what the kernel says that a process has written (Linux, gloo).
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.from_scratch.averaging import MIB, written_bytes
from scripts.model_split import BLOCKS, Stage, make_pipeline, make_resnet
from utils.parallel.pipeline import measure_blocks

MICRO_BATCHES = 4
WARMUP, STEPS = 1, 2


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image_size", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=32, help="of both processes together")
    parser.add_argument("--split", default="layer3.0", help="first block of the second stage")
    return parser.parse_args()


def sent_mib(step) -> list[float]:
    """MiB that each process sends in one call of `step`, the mean of a few. Collective."""
    for _ in range(WARMUP):
        step()
    dist.barrier()
    before = written_bytes()
    for _ in range(STEPS):
        step()
    return gather_object([(written_bytes() - before) / STEPS / MIB])


def ddp_step(images, labels, holds_back):
    """A step of this process's half of each micro-batch; holds_back: one all-reduce, in the last backward pass."""
    model = DistributedDataParallel(make_resnet(10))

    def step():
        for number, (x, y) in enumerate(zip(images, labels, strict=True)):
            x, y = (tensor.tensor_split(2)[dist.get_rank()] for tensor in (x, y))
            waits = holds_back and number < MICRO_BATCHES - 1
            with model.no_sync() if waits else contextlib.nullcontext():
                F.cross_entropy(model(x.float()), y).backward()

    return step


def pipeline_step(images, labels, split, accelerator):
    resnet = make_resnet(10)
    costs = measure_blocks({block: Stage(resnet, [block]) for block in BLOCKS}, images[0])
    first = BLOCKS.index(split)
    blocks = [BLOCKS[:first], BLOCKS[first:]]
    examples = [images[0].to("meta"), *(costs[names[-1]].output for names in blocks)]
    _, pipeline, _ = make_pipeline(resnet, blocks, examples, "1f1b", 2, accelerator, [accelerator.device])
    return lambda: pipeline.run(list(images), list(labels), F.cross_entropy)


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = (args.batch_size, 3, args.image_size, args.image_size)
    images = torch.randint(256, size, dtype=torch.uint8).tensor_split(MICRO_BATCHES)
    labels = torch.randint(10, (args.batch_size,)).tensor_split(MICRO_BATCHES)
    steps = {
        "DDP, an all-reduce for each micro-batch": ddp_step(images, labels, holds_back=False),
        "DDP, accumulation with no_sync": ddp_step(images, labels, holds_back=True),
        f"pipeline of two stages, split at {args.split}": pipeline_step(images, labels, args.split, accelerator),
    }
    gradients = sum(parameter.nbytes for parameter in make_resnet(10).parameters()) / MIB
    accelerator.print(f"gradients: {gradients:.1f} MiB", flush=True)
    for name, step in steps.items():
        sent = ", ".join(f"{mib:.1f}" for mib in sent_mib(step))
        accelerator.print(f"{name}: {sent} MiB", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
