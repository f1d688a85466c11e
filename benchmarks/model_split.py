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

STAGES, CPU = 2, torch.device("cpu")


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--batch_size", type=common.positive_int, default=64, help="%(default)s")
    add("--microbatches", type=int, nargs="+", default=[1, 4, 8])
    return parser.parse_args()


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


class Steps:
    """Steps of ResNet-50 with random images of 64 x 64 pixels in `m` micro-batches, on one thread of each process."""

    def __init__(self, accelerator, batch_size: int, m: int):
        torch.set_num_threads(1)
        pipeline.PipelineStage = RecordedStage
        images = torch.randint(256, (batch_size, 3, 64, 64), dtype=torch.uint8)
        data, options = TensorDataset(images, torch.arange(batch_size)), {"shard": (0, 1), "accumulation": m}
        self.batches = list(GlobalLoader(data, len(data), accelerator, seed=0, name=f"{m}", **options))
        self.images = [batch.data[0] for batch in self.batches]
        self.accelerator, self.resnet = accelerator, model_split.make_resnet(1000)

    def pipelines(self, *schedules: str) -> dict[str, tuple]:
        """By schedule: the part of a copy of the model that this process has, and the pipeline that runs it. The stages
        are as even as they can be. Collective."""
        blocks = {name: model_split.Stage(self.resnet, [name]) for name in model_split.BLOCKS}
        costs = pipeline.measure_blocks(blocks, self.images[0])
        stages = pipeline.balance_stages(costs, STAGES)
        examples = [self.images[0].to("meta"), *(costs[names[-1]].output for names in stages)]
        made = {}
        for schedule in schedules:
            split = (copy.deepcopy(self.resnet), stages, examples, schedule, STAGES, self.accelerator, [CPU])
            made[schedule] = model_split.make_pipeline(*split)[:2]
        return made

    def run(self, pipe) -> list[list]:
        """The spans of this process in a step."""
        RecordedStage.spans = []
        pipe.run(self.images, self.batches, model_split.make_loss_fn(Metrics(self.accelerator).add))
        return RecordedStage.spans


def busy_s(spans: list[list]) -> float:
    """Seconds in which a stage computes."""
    return sum(end - start for *_, start, end in spans)


def worker(args) -> list[list]:
    """What each of the two processes does.

    The first one alone runs a step of the whole model, then both run one of the pipeline, and so on; the first step is
    for warm-up. Returns, for each number of micro-batches: that number, images/s unsplit and split, and the fraction of
    a step in which each stage is idle.
    """
    accelerator, rows = TrainingAccelerator(cpu=True), []
    for m in args.microbatches:
        steps = Steps(accelerator, args.batch_size, m)
        whole = model_split.Stage(steps.resnet, model_split.BLOCKS)
        ways = {"unsplit": (whole, pipeline.OneProcess([whole], [CPU], 1)), **steps.pipelines("1f1b")}
        adamw = {way: torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for way, (model, _) in ways.items()}
        seconds, idle = {way: [] for way in ways}, []
        for _ in range(args.rounds + 1):
            for way, (_, pipe) in ways.items():
                accelerator.wait_for_everyone()
                began = time.perf_counter()
                if way == "1f1b" or accelerator.is_main_process:
                    spans = steps.run(pipe)
                    if way == "1f1b":
                        idle.append(1 - busy_s(spans) / (time.perf_counter() - began))
                    adamw[way].step()
                    adamw[way].zero_grad()
                accelerator.wait_for_everyone()
                seconds[way].append(time.perf_counter() - began)
        rates = [args.batch_size / statistics.median(each[1:]) for each in seconds.values()]
        rows.append([m, *rates, gather_object([statistics.median(idle[1:])])])
    return rows


def measure(args) -> list[list]:
    return common.launch_workers("cpu_ddp", __file__)


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
