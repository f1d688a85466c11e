"""ResNet-50 on 2 processes with 1 thread each against the whole model on 1 thread, and how equal their weights stay.

    python benchmarks/model_split.py                 # all of it: 20 minutes on 2 cores
    python benchmarks/model_split.py speed --microbatches 8

- speed: images/s of 1F1B for m micro-batches against the unsplit model with the same micro-batches one after another,
  in turns, an update each, so that both see the same machine: medians. Ideal is p * m / (m + p - 1), all that a
  pipeline of p equal stages can reach.
- split: the cut that --split auto finds, and the one of the blog (after layer2), with stage times and memory.
- exact: the largest difference of a weight to the unsplit model's after 20 updates, over the largest weight of its
  tensor, in float64 with GroupNorm, where the unsplit model takes the batch at once; then in float32 with BatchNorm,
  where it takes the same micro-batches.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch
import torch
from accelerate import Accelerator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts import model_split  # noqa: E402
from utils.data import BUNDLED_MNIST, GlobalBatches  # noqa: E402
from utils.metrics import SampleStats  # noqa: E402
from utils.pipeline import OneProcess, cut_evenly, measure_blocks  # noqa: E402

PORT, BATCH = 29677, 64
SPEED = ["--synthetic", "--image_size", 64, "--batch_size", BATCH, "--cpu_threads", 1, "--log_every", 1]
STAGES = 2
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # two copies take the mean of theirs


def run(folder: Path, config: str, *flags, processes: int | None = None) -> Path:
    """One run of the script in `folder`."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--main_process_port", PORT]
    command += ["--num_processes", processes] if processes else []
    command += [ROOT / "scripts" / "model_split.py", "--output_dir", folder, *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return folder


def images_per_s(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["images_per_s"] for line in lines if line["split"] == "train"][1:]


def speed(counts: list[int], rounds: int) -> None:
    print(
        "| m | unsplit, images/s | 2 stages, images/s | speed-up | ideal | of ideal | idle measured | idle in theory |"
    )
    print("|" + " --- |" * 8, flush=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", PORT, "--config_file"]
    command += [ROOT / "accelerate_configs" / "cpu_ddp.yaml", __file__, "turns", "--rounds", rounds, "--microbatches"]
    subprocess.run([str(word) for word in [*command, *counts]], stderr=subprocess.DEVNULL, check=True, timeout=1800)


def turns(work: Path, counts: list[int], rounds: int) -> None:
    """On two processes: the first one alone with the whole model, then both with a stage each, and so on."""
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    cpu, data = torch.device("cpu"), model_split.synthetic(BATCH, 64, seed=0)
    share = SimpleNamespace(device=cpu, num_processes=1, process_index=0)
    for m in counts:
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
        for again in range(rounds + 1):
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
        idle = pipeline.timeline.report(accelerator, f"1f1b, {STAGES} stages, {m} micro-batches", work / f"{m}.png")
        ideal, theory = STAGES * m / (m + STAGES - 1), (STAGES - 1) / (m + STAGES - 1)
        shown = f"{unsplit:.1f} | {split:.1f} | {split / unsplit:.2f} | {ideal:.2f} | {split / unsplit / ideal:.2f}"
        row = f"| {m} | {shown} | {', '.join(f'{share:.0%}' for share in idle)} | {theory:.0%} |"
        accelerator.print(row, flush=True)
    accelerator.end_training()


def split(work: Path, steps: int) -> None:
    print("\n| split | stage | blocks | parameters | time, ms | share | activations, MiB | peak, GiB | images/s |")
    print("|" + " --- |" * 9)
    ways = {"unsplit": ("cpu", []), "auto": ("cpu_ddp", []), "memory": ("cpu_ddp", ["--balance", "memory"])}
    ways["by hand"] = ("cpu_ddp", ["--split", "layer3.0"])
    for name, (config, flags) in ways.items():
        folder = run(work / f"split_{name}", config, *SPEED, "--num_microbatches", 8, "--max_steps", steps, *flags)
        rate = statistics.median(images_per_s(folder))
        peaks = json.loads((folder / "summary.json").read_text())["peak_memory_gib_above_start"]
        for row in json.loads((folder / "run.json").read_text())["launches"][0]["stages"]:
            cells = [name, row["stage"], row["blocks"], f"{row['parameters']:,}", row["time_ms"]]
            cells += [f"{row['time_share']:.1%}", row["activations_mib"], peaks[row["stage"]], f"{rate:.1f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def exact(work: Path, schedules: list[str]) -> None:
    import pyarrow.parquet

    small = work / "data"
    small.mkdir()
    for name, rows in (("train", 320), ("test", 16)):
        name = f"{name}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(f"{BUNDLED_MNIST}/{name}").slice(0, rows), small / name)
    flags = ["--dataset", small, "--batch_size", 16, "--max_steps", 20]
    layouts = {"2 stages": (2, 2, 4), "4 stages": (4, 4, 4), "2 x 2": (4, 2, 2)}
    kinds = {"float64, group": ["--dtype", "float64", "--norm", "group"], "float32, batch": []}
    print("\n| numbers | schedule | " + " | ".join(layouts) + " |\n|" + " --- |" * (2 + len(layouts)), flush=True)
    for kind, more in kinds.items():
        at_once = ["--num_microbatches", 1 if "group" in kind else 4, "--cpu_threads", 1]
        whole = safetensors.torch.load_file(run(work / kind, "cpu", *flags, *more, *at_once) / "model.safetensors")
        whole = {name: tensor for name, tensor in whole.items() if not name.endswith(STATISTICS)}
        for schedule in schedules:
            row = []
            for layout, (processes, stages, m) in layouts.items():
                how = ["--schedule", schedule, "--num_stages", stages, "--num_microbatches", m]
                folder = run(work / f"{schedule}_{layout}_{kind}", "cpu_ddp", *flags, *more, *how, processes=processes)
                weights = safetensors.torch.load_file(folder / "model.safetensors")
                pairs = [(weights[name], tensor) for name, tensor in whole.items()]
                row.append(max(float((mine - tensor).abs().max() / tensor.abs().max()) for mine, tensor in pairs))
            print(f"| {kind} | {schedule} | " + " | ".join(f"{largest:.1e}" for largest in row) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["speed", "split", "exact"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=["naive", "gpipe", "1f1b", "interleaved"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "speed" in words.parts:
            speed(words.microbatches, words.rounds)
        if "turns" in words.parts:  # what `speed` launches
            turns(Path(folder), words.microbatches, words.rounds)
        if "split" in words.parts:
            split(Path(folder), words.steps)
        if "exact" in words.parts:
            exact(Path(folder), words.schedules)
