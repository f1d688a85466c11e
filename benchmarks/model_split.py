"""ResNet-50 split into two stages.

    python benchmarks/model_split.py                 # all of it: 20 minutes on 2 cores
    python benchmarks/model_split.py speed --microbatches 8

Two processes with one thread each, compared with the whole model on one thread:

- speed: images/s of 1F1B for m micro-batches, and of the unsplit model with the same micro-batches one after another.
  They take turns, one step each, so that both see the same machine. The ideal speed-up of a pipeline of p equal stages
  is p m / (m + p - 1).
- split: the split that --split auto finds, the one of --balance memory, and one by hand (after layer2), with the times
  and the memory of the stages.
"""

import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import model_split
from utils.loader import GlobalLoader
from utils.metrics import Metrics
from utils.parallel import pipeline

STAGES = 2


def parse_args():
    parser = common.make_parser(__doc__, rounds=5, worker=True)
    parts = ["speed", "split"]
    add = parser.add_argument
    add("parts", nargs="*", default=parts, help=", ".join(parts))
    add("--batch_size", type=common.positive_int, default=64, help="%(default)s")
    add("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--steps", type=int, default=7, help="steps of `split`")
    args = parser.parse_args()
    common.check_names(parser, "part", args.parts, parts)
    return args


def run(folder: Path, config: str, *flags, processes: int | None = None) -> Path:
    """One run of the script in `folder`."""
    script = common.ROOT / "scripts" / "model_split.py"
    launch_flags = ["--num_processes", processes] if processes else []
    flags = ["--output_dir", folder, *flags]
    common.launch(config, script, *flags, launch_flags=launch_flags, timeout_s=900)
    return folder


def speed(args) -> list[list]:
    flags = ["--rounds", args.rounds, "--batch_size", args.batch_size, "--microbatches", *args.microbatches]
    return common.launch_workers("cpu_ddp", __file__, *flags, timeout_s=1800)


def worker(args) -> None:
    """What each of the two processes does for `speed`.

    The first one alone runs a step of the whole model, then both run one of the pipeline, and so on. Writes, for each
    number of micro-batches: that number, images/s unsplit and split, and the fraction of a step in which each stage is
    idle.
    """
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    data = TensorDataset(
        torch.randint(256, (args.batch_size, 3, 64, 64), dtype=torch.uint8), torch.arange(args.batch_size)
    )
    rows = []
    for m in args.microbatches:
        seconds, idle = time_steps(accelerator, make_ways(accelerator, data, m), data, m, args.rounds)
        rates = [args.batch_size / statistics.median(seconds[way][1:]) for way in ("unsplit", "split")]
        rows.append([m, *rates, gather_object([statistics.median(idle[1:])])])
    if accelerator.is_main_process:
        Path(args.worker).write_text(json.dumps(rows))
    accelerator.end_training()


def make_ways(accelerator, data, m: int) -> dict[str, tuple]:
    """By way: the model, or the part of it that this process has, and the pipeline that runs it."""
    cpu = torch.device("cpu")
    resnet, images = model_split.make_resnet(1000), data.tensors[0]
    blocks = {name: model_split.Stage(resnet, [name]) for name in model_split.BLOCKS}
    costs = pipeline.measure_blocks(blocks, images[: len(data) // m])
    stages = pipeline.balance_stages(costs, STAGES, "time", "1f1b", m)
    examples = [images[:1].to("meta"), *(costs[names[-1]].output for names in stages)]
    whole = model_split.Stage(copy.deepcopy(resnet), model_split.BLOCKS)
    part, pipe, _ = model_split.make_pipeline(resnet, stages, examples, "1f1b", STAGES, accelerator, [cpu])
    return {"unsplit": (whole, pipeline.OneProcess([whole], [cpu], 1)), "split": (part, pipe)}


class TimedStage(pipeline.PipelineStage):
    """A stage that adds up the seconds in which it computes, without those in which it waits for other stages."""

    busy_s = 0.0

    def _timed(self, method, *args, **kwargs):
        began = time.perf_counter()
        result = method(*args, **kwargs)
        TimedStage.busy_s += time.perf_counter() - began
        return result

    def forward_one_chunk(self, *args, **kwargs):
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        return self._timed(super().backward_one_chunk, *args, **kwargs)


def time_steps(accelerator, ways: dict[str, tuple], data, m: int, rounds: int) -> tuple[dict[str, list], list]:
    """Seconds of each step, by way, and for which part of it this stage is idle; the first step is for warm-up."""
    pipeline.PipelineStage = TimedStage
    optimizers = {}
    for way, (model, _) in ways.items():
        optimizers[way] = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    loader = GlobalLoader(data, len(data), accelerator, seed=0, shard=(0, 1), accumulation=m)
    batches = list(loader)
    images = [batch.data[0] for batch in batches]
    metrics = Metrics(accelerator, all_ranks_add=False)
    loss_fn = model_split.make_loss_fn(metrics.add)
    seconds = {way: [] for way in ways}
    idle = []
    for _ in range(rounds + 1):
        for way, (_, pipe) in ways.items():
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            if way == "split" or accelerator.is_main_process:
                TimedStage.busy_s = 0.0
                pipe.run(images, batches, loss_fn)
                if way == "split":
                    idle.append(1 - TimedStage.busy_s / (time.perf_counter() - began))
                optimizers[way].step()
                optimizers[way].zero_grad()
            accelerator.wait_for_everyone()
            seconds[way].append(time.perf_counter() - began)
            metrics.clear()
    return seconds, idle


def split(args) -> list[list]:
    """For each split: its name, its images/s, what the script says of each stage, peak memory."""
    flags = ["--batch_size", args.batch_size, "--cpu_threads", 1]
    flags += ["--log_every", 1, "--num_microbatches", 8, "--max_steps", args.steps, "--dataset"]
    ways = {
        "unsplit": ("cpu", []),
        "auto": ("cpu_ddp", []),
        "memory": ("cpu_ddp", ["--balance", "memory"]),
        "by hand": ("cpu_ddp", ["--split", "layer3.0"]),
    }
    results = []
    for name, (config, more) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            write_random_images(Path(folder) / "data", args.batch_size)
            folder = run(Path(folder) / "run", config, *flags, Path(folder) / "data", *more)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            lines = [json.loads(line) for line in lines]
            rates = [line["samples_per_s"] for line in lines if line["split"] == "train"]
            stages = json.loads((folder / "run.json").read_text())["launches"][0]["stages"]
            summary = json.loads((folder / "summary.json").read_text())
            results.append([name, statistics.median(rates[1:]), stages, summary["peak_memory_gib"]])
    return results


def write_random_images(folder: Path, count: int) -> None:
    """A data set of images of 64 pixels in two classes."""
    for split in ("train", "test"):
        for number in range(count):
            file = folder / split / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            torchvision.io.write_png(torch.randint(256, (3, 64, 64), dtype=torch.uint8), str(file))


def measure(args) -> dict:
    return {part: globals()[part](args) for part in args.parts}


def report(measured) -> common.Report:
    tables, bars = [], []
    if "speed" in measured:
        table, speed_ups = speed_table(measured["speed"])
        tables.append(f"Speed:\n\n{table}")
        title = "ResNet-50 in two stages: speed / the unsplit model's"
        bars.append(common.Bars(title, speed_ups, ours=len(speed_ups)))
    if "split" in measured:
        table = split_table(measured["split"])
        tables.append(f"Splits, 8 micro-batches:\n\n{table}")
    return common.Report(tables, bars, [])


def speed_table(measured) -> tuple[str, dict[str, float]]:
    columns = {
        "m": "{}",
        "unsplit, images/s": "{:.1f}",
        "2 stages, images/s": "{:.1f}",
        "speed-up": "{:.2f}",
        "ideal": "{:.2f}",
        "of ideal": "{:.2f}",
        "idle measured": "{}",
        "idle in theory": "{:.0%}",
    }
    rows, speed_ups = [], {}
    for m, unsplit, split_rate, idle in measured:
        speed_up = split_rate / unsplit
        speed_ups[f"{m} micro-batches"] = speed_up
        ideal = STAGES * m / (m + STAGES - 1)
        idle_in_theory = (STAGES - 1) / (m + STAGES - 1)
        idle = ", ".join(f"{fraction:.0%}" for fraction in idle)
        row = [m, unsplit, split_rate, speed_up, ideal, speed_up / ideal, idle, idle_in_theory]
        rows.append(row)
    return common.table(columns, rows), speed_ups


def split_table(measured) -> str:
    columns = {
        "split": "{}",
        "stage": "{}",
        "blocks": "{}",
        "parameters": "{:,}",
        "time, ms": "{}",
        "share": "{:.1%}",
        "activations, MiB": "{}",
        "peak, GiB": "{}",
        "images/s": "{:.1f}",
    }
    names = ("stage", "blocks", "parameters", "time_ms", "time_share", "activations_mib")
    rows = []
    for name, rate, stages, peak in measured:
        rows += [[name, *(stage[key] for key in names), peak, rate] for stage in stages]
    return common.table(columns, rows)


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
