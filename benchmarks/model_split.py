"""ResNet-50 cut in two.

    python benchmarks/model_split.py                 # all of it: 20 minutes on 2 cores
    python benchmarks/model_split.py speed --microbatches 8

On 2 processes with 1 thread each, against the whole model on 1 thread:

- speed: images/s of 1F1B for m micro-batches against the unsplit model with the same micro-batches one after another,
  in turns, an update each, so that both see the same machine. Ideal is p m / (m + p - 1), all that a pipeline of p
  equal stages can reach.
- split: the cut that --split auto finds, the one by --balance memory, and the one of the blog (after layer2), with
  stage times and memory.
- exact: the largest difference of a weight to the unsplit model's after 20 updates, over the largest weight of its
  tensor, in float64 with GroupNorm, where the unsplit model takes the batch at once; then in float32 with BatchNorm,
  where it takes the same micro-batches.
"""

import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch
import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import model_split
from utils.data import BUNDLED_MNIST, GlobalBatches
from utils.metrics import SampleStats
from utils.pipeline import OneProcess, cut_evenly, measure_blocks

BATCH, STAGES = 64, 2
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # two copies take the mean of theirs
KINDS = {"float64, group": ["--dtype", "float64", "--norm", "group"], "float32, batch": []}
LAYOUTS = {"2 stages": (2, 2, 4), "4 stages": (4, 4, 4), "2 x 2": (4, 2, 2)}  # processes, stages, micro-batches


def parse_args():
    parser = common.make_parser(__doc__, rounds=5)
    parser.add_argument("parts", nargs="*", default=["speed", "split", "exact"], help="speed, split, exact")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=["naive", "gpipe", "1f1b", "interleaved"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=7, help="updates of `split`")
    parser.add_argument("--worker", help="for the processes that it launches: where to write")
    args = parser.parse_args()
    common.refuse_unknown(parser, "part", args.parts, ("speed", "split", "exact"))
    return args


def run(folder: Path, config: str, *flags, processes: int | None = None) -> Path:
    """One run of the script in `folder`."""
    script = common.ROOT / "scripts" / "model_split.py"
    launch_flags = ["--num_processes", processes] if processes else []
    common.launch(config, script, "--output_dir", folder, *flags, launch_flags=launch_flags, timeout_s=900)
    return folder


def speed(args) -> list[list]:
    flags = ["--rounds", args.rounds, "--microbatches", *args.microbatches]
    return common.launch_workers("cpu_ddp", __file__, *flags, timeout_s=1800)


def worker(args) -> None:
    """On two processes: the first one alone with the whole model, then both with a stage each, and so on.

    Writes, for each number of micro-batches: it, images/s unsplit and split, and the idle share of each stage.
    """
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    cpu, data = torch.device("cpu"), model_split.synthetic(BATCH, 64, seed=0)
    share = SimpleNamespace(device=cpu, num_processes=1, process_index=0)
    rows = []
    for m in args.microbatches:
        resnet = model_split.make_resnet(1000)
        blocks = {name: model_split.Stage(resnet, [name]) for name in model_split.BLOCKS}
        costs = measure_blocks(blocks, data.images[: BATCH // m])
        cut = cut_evenly(costs, STAGES, "time", "1f1b", m)
        ends = [data.images[:1].to("meta"), *(costs[names[-1]].output for names in cut)]
        whole = model_split.Stage(copy.deepcopy(resnet), model_split.BLOCKS)
        part, pipeline, _ = model_split.make_pipeline(resnet, cut, ends, "1f1b", STAGES, accelerator, [cpu])
        ways = {"unsplit": (whole, OneProcess({0: whole}, [(0, cpu)], "naive")), "split": (part, pipeline)}
        optimizers = {way: torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for way, (model, _) in ways.items()}
        window = list(GlobalBatches(data, BATCH, share, 0, m).epoch())
        times = {way: [] for way in ways}
        for again in range(args.rounds + 1):
            for way, (_, runner) in ways.items():
                accelerator.wait_for_everyone()
                began = time.perf_counter()
                if way == "split" or accelerator.is_main_process:
                    if again:
                        runner.timeline.begin()
                    runner.run(window, model_split.record_losses(SampleStats(accelerator), accelerator))
                    if again:
                        runner.timeline.end()
                    optimizers[way].step()
                    optimizers[way].zero_grad()
                accelerator.wait_for_everyone()
                times[way].append(time.perf_counter() - began)
        unsplit, split = (BATCH / statistics.median(times[way][1:]) for way in ways)
        picture = Path(args.worker).parent / f"{m}.png"
        idle = pipeline.timeline.report(accelerator, f"1f1b, {STAGES} stages, {m} micro-batches", picture)
        rows.append([m, unsplit, split, idle])
    if accelerator.is_main_process:
        Path(args.worker).write_text(json.dumps(rows))
    accelerator.end_training()


def split(args) -> list[list]:
    """For each cut: its name, its images/s, and a list of stages with what the script says of each."""
    synthetic = ["--synthetic", "--image_size", 64, "--batch_size", BATCH, "--cpu_threads", 1, "--log_every", 1]
    ways = {"unsplit": ("cpu", []), "auto": ("cpu_ddp", []), "memory": ("cpu_ddp", ["--balance", "memory"])}
    ways["by hand"] = ("cpu_ddp", ["--split", "layer3.0"])
    results = []
    for name, (config, flags) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = [*synthetic, "--num_microbatches", 8, "--max_steps", args.steps, *flags]
            folder = run(Path(folder), config, *flags)
            lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            rates = [line["images_per_s"] for line in lines if line["split"] == "train"][1:]
            stages = json.loads((folder / "run.json").read_text())["launches"][0]["stages"]
            peaks = json.loads((folder / "summary.json").read_text())["peak_memory_gib_above_start"]
            results.append([name, statistics.median(rates), stages, peaks])
    return results


def exact(args) -> list[list]:
    """For each kind of numbers and schedule: the largest difference in each layout."""
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        small = work / "data"
        small.mkdir()
        for name, rows in (("train", 320), ("test", 16)):
            name = f"{name}-00000-of-00001.parquet"
            part = pyarrow.parquet.read_table(f"{BUNDLED_MNIST}/{name}").slice(0, rows)
            pyarrow.parquet.write_table(part, small / name)
        flags = ["--dataset", small, "--batch_size", 16, "--max_steps", 20]
        results = []
        for kind, more in KINDS.items():
            at_once = ["--num_microbatches", 1 if "group" in kind else 4, "--cpu_threads", 1]
            whole = run(work / kind, "cpu", *flags, *more, *at_once) / "model.safetensors"
            whole = {
                name: tensor
                for name, tensor in safetensors.torch.load_file(whole).items()
                if not name.endswith(STATISTICS)
            }
            for schedule in args.schedules:
                row = []
                for layout in args.layouts:
                    processes, stages, m = LAYOUTS[layout]
                    how = ["--schedule", schedule, "--num_stages", stages, "--num_microbatches", m]
                    where = work / f"{schedule}_{layout}_{kind}"
                    run(where, "cpu_ddp", *flags, *more, *how, processes=processes)
                    weights = safetensors.torch.load_file(where / "model.safetensors")
                    pairs = [(weights[name], tensor) for name, tensor in whole.items()]
                    row.append(max(float((mine - tensor).abs().max() / tensor.abs().max()) for mine, tensor in pairs))
                results.append([kind, schedule, dict(zip(args.layouts, row, strict=True))])
        return results


def measure(args) -> dict:
    return {part: globals()[part](args) for part in args.parts}


def report(measured) -> common.Report:
    tables, bars = [], []
    if "speed" in measured:
        columns = {"m": "{}", "unsplit, images/s": "{:.1f}", "2 stages, images/s": "{:.1f}", "speed-up": "{:.2f}"}
        columns |= {"ideal": "{:.2f}", "of ideal": "{:.2f}", "idle measured": "{}", "idle in theory": "{:.0%}"}
        rows, speed_ups = [], {}
        for m, unsplit, split, idle in measured["speed"]:
            ideal, theory = STAGES * m / (m + STAGES - 1), (STAGES - 1) / (m + STAGES - 1)
            speed_ups[f"{m} micro-batches"] = split / unsplit
            shares = ", ".join(f"{share:.0%}" for share in idle)
            rows.append([m, unsplit, split, split / unsplit, ideal, split / unsplit / ideal, shares, theory])
        tables.append(f"Speed:\n\n{common.table(columns, rows)}")
        bars.append(common.Bars("ResNet-50 cut in two: speed / the unsplit model's", speed_ups, ours=len(speed_ups)))
    if "split" in measured:
        columns = {
            "split": "{}",
            "stage": "{}",
            "blocks": "{}",
            "parameters": "{:,}",
            "time, ms": "{}",
            "share": "{:.1%}",
        }
        columns |= {"activations, MiB": "{}", "peak, GiB": "{}", "images/s": "{:.1f}"}
        names = ("stage", "blocks", "parameters", "time_ms", "time_share", "activations_mib")
        rows = [
            [name, *(stage[key] for key in names), peaks[stage["stage"]], rate]
            for name, rate, stages, peaks in measured["split"]
            for stage in stages
        ]
        tables.append(f"Cuts, 8 micro-batches of 8 images:\n\n{common.table(columns, rows)}")
    if "exact" in measured:
        layouts = list(measured["exact"][0][2])
        columns = {"numbers": "{}", "schedule": "{}"} | dict.fromkeys(layouts, "{:.1e}")
        rows = [[kind, schedule, *by_layout.values()] for kind, schedule, by_layout in measured["exact"]]
        tables.append(f"Weights after 20 updates:\n\n{common.table(columns, rows)}")
    return common.Report(tables, bars, [])


if __name__ == "__main__":
    args = parse_args()
    worker(args) if args.worker else common.main(args, measure, report)
