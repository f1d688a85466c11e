"""ResNet-50 split into two stages.

    python benchmarks/model_split.py

Images/s of 1F1B on two processes with one thread each, for m micro-batches, and of the unsplit model on one thread,
with the same micro-batches one after another: 64 images of 64 x 64 pixels. They take turns, one step each, so that both
see the same machine. The ideal speed-up of a pipeline of p equal stages is p m / (m + p - 1).
"""

import copy
import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import model_split
from utils.accelerator import TrainingAccelerator
from utils.loader import GlobalLoader
from utils.metrics import Metrics
from utils.parallel import pipeline

STAGES = 2


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--batch_size", type=common.positive_int, default=64, help="%(default)s")
    add("--microbatches", type=int, nargs="+", default=[1, 4, 8])
    return parser.parse_args()


def worker(args) -> list[list]:
    """What each of the two processes does.

    The first one alone runs a step of the whole model, then both run one of the pipeline, and so on. Returns, for each
    number of micro-batches: that number, images/s unsplit and split, and the fraction of a step in which each stage is
    idle.
    """
    accelerator = TrainingAccelerator(cpu=True)
    torch.set_num_threads(1)
    data = TensorDataset(
        torch.randint(256, (args.batch_size, 3, 64, 64), dtype=torch.uint8), torch.arange(args.batch_size)
    )
    rows = []
    for m in args.microbatches:
        seconds, idle = time_steps(accelerator, make_ways(accelerator, data, m), data, m, args.rounds)
        rates = [args.batch_size / statistics.median(seconds[way][1:]) for way in ("unsplit", "split")]
        rows.append([m, *rates, gather_object([statistics.median(idle[1:])])])
    return rows


def balanced_stages(resnet, images: torch.Tensor) -> tuple[list, list]:
    """The blocks of each stage, as even as they can be, and examples of what goes into and comes out of the stages.

    Args:
        images: a micro-batch, uint8 (N, 3, H, W).
    """
    blocks = {name: model_split.Stage(resnet, [name]) for name in model_split.BLOCKS}
    costs = pipeline.measure_blocks(blocks, images)
    stages = pipeline.balance_stages(costs, STAGES)
    return stages, [images.to("meta"), *(costs[names[-1]].output for names in stages)]


def make_ways(accelerator, data, m: int) -> dict[str, tuple]:
    """By way: the model, or the part of it that this process has, and the pipeline that runs it."""
    cpu = torch.device("cpu")
    resnet, images = model_split.make_resnet(1000), data.tensors[0]
    stages, examples = balanced_stages(resnet, images[: len(data) // m])
    whole = model_split.Stage(copy.deepcopy(resnet), model_split.BLOCKS)
    part, pipe, _ = model_split.make_pipeline(resnet, stages, examples, "1f1b", STAGES, accelerator, [cpu])
    return {"unsplit": (whole, pipeline.OneProcess([whole], [cpu], 1)), "split": (part, pipe)}


class RecordedStage(pipeline.PipelineStage):
    """A stage that records when it computes, without the time in which it waits for others."""

    spans = ()  # of the step: forward or backward, the number of the micro-batch, start and end in s

    def forward_one_chunk(self, *args, **kwargs):
        return self._recorded("forward", super().forward_one_chunk, args, kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        return self._recorded("backward", super().backward_one_chunk, args, kwargs)

    def _recorded(self, kind, method, args, kwargs):
        began = time.perf_counter()  # one clock for all processes of a machine
        result = method(*args, **kwargs)
        number = sum(span[0] == kind for span in RecordedStage.spans)
        RecordedStage.spans.append([kind, number, began, time.perf_counter()])
        return result


def busy_s(spans: list[list]) -> float:
    """Seconds in which a stage computes."""
    return sum(end - start for *_, start, end in spans)


def time_steps(accelerator, ways: dict[str, tuple], data, m: int, rounds: int) -> tuple[dict[str, list], list]:
    """Seconds of each step, by way, and for which part of it this stage is idle; the first step is for warm-up."""
    pipeline.PipelineStage = RecordedStage
    optimizers = {}
    for way, (model, _) in ways.items():
        optimizers[way] = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    loader = GlobalLoader(data, len(data), accelerator, seed=0, name=f"{m}", shard=(0, 1), accumulation=m)
    batches = list(loader)
    images = [batch.data[0] for batch in batches]
    seconds = {way: [] for way in ways}
    idle = []
    for _ in range(rounds + 1):
        for way, (_, pipe) in ways.items():
            loss_fn = model_split.make_loss_fn(Metrics(accelerator).add)
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            if way == "split" or accelerator.is_main_process:
                RecordedStage.spans = []
                pipe.run(images, batches, loss_fn)
                if way == "split":
                    idle.append(1 - busy_s(RecordedStage.spans) / (time.perf_counter() - began))
                optimizers[way].step()
                optimizers[way].zero_grad()
            accelerator.wait_for_everyone()
            seconds[way].append(time.perf_counter() - began)
    return seconds, idle


def measure(args) -> list[list]:
    flags = ["--rounds", args.rounds, "--batch_size", args.batch_size, "--microbatches", *args.microbatches]
    return common.launch_workers("cpu_ddp", __file__, *flags)


def report(measured) -> list[str]:
    columns = {"m": "{}", "unsplit, images/s": "{:.1f}", "2 stages, images/s": "{:.1f}", "speed-up": "{:.2f}"}
    columns |= {"ideal": "{:.2f}", "idle measured": "{}", "idle in theory": "{:.0%}"}
    rows = []
    for m, unsplit, split, idle in measured:
        ideal, idle_in_theory = STAGES * m / (m + STAGES - 1), (STAGES - 1) / (m + STAGES - 1)
        idle = ", ".join(f"{fraction:.0%}" for fraction in idle)
        rows.append([m, unsplit, split, split / unsplit, ideal, idle, idle_in_theory])
    return [common.table(columns, rows)]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
