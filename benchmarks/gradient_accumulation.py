"""Gradients of scripts/gradient_accumulation.py and of the loop from blog posts, held against the whole batch's.

    python benchmarks/gradient_accumulation.py

1069 images, batch 128: 8 updates and a last one of 45. For k micro-batches on P processes, the largest relative
difference of the gradient to that of the whole batch at once: in the full windows of the epoch, and in the last one.

- ours: the script as it stands, with --compare
- naive: `loss = criterion(...) / k; backward(); if (i + 1) % k == 0 or last: step()` with a mean as criterion, a
  prepared DataLoader and DDP as they come

Then the gradient all-reduces (counted in DDP's communication hook), BatchNorm against LayerNorm, and memory: the peak
of two updates of 16384 images above what the process had before them. Takes about 15 minutes on 2 busy cores.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.gradient_accumulation import CellNet, count_all_reduces, gradient_difference  # noqa: E402
from utils.data import BUNDLED_MNIST, GlobalBatches, load_images  # noqa: E402

NUM_IMAGES, BATCH, STEPS, MEMORY_BATCH = 1069, 128, (1, 2, 4, 8), 16384
CONFIGS = {1: "cpu", 2: "cpu_ddp"}
PORT = 29655


def naive(dataset: str, out: str) -> None:
    """The blog's loop on the processes of this launch, for each k, type and loss; the main process writes `out`."""
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    data, _ = load_images(dataset)
    batches = GlobalBatches(data, BATCH, accelerator, seed=0)
    order, results = batches.order(0), []
    for variable_length in (False, True):
        for dtype in (torch.float64, torch.float32):
            for k in STEPS:
                torch.manual_seed(0)
                model = CellNet(1, 10, "none", variable_length).to(dtype)
                loader = DataLoader(
                    TensorDataset(data.images[order], data.labels[order]), BATCH // k // accelerator.num_processes
                )
                optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
                model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
                counts, differences = count_all_reduces(model), []
                for i, (images, labels) in enumerate(loader):
                    losses, terms, _ = model(images, labels)
                    accelerator.backward(losses.sum() / terms.sum() / k)
                    if (i + 1) % k == 0 or i + 1 == len(loader):
                        indices = order[len(differences) * BATCH :][:BATCH]
                        bare = accelerator.unwrap_model(model)
                        norm = torch.nn.utils.clip_grad_norm_(bare.parameters(), math.inf)
                        differences.append(gradient_difference(bare, norm, batches, indices, math.inf))
                        optimizer.step()
                        optimizer.zero_grad()
                results.append([variable_length, str(dtype)[6:], k, differences, counts["gradient_all_reduces"]])
                accelerator.free_memory()
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(results))
    accelerator.end_training()


def launch(processes: int, script: Path, *flags) -> None:
    config = ROOT / "accelerate_configs" / f"{CONFIGS[processes]}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    command += ["--main_process_port", PORT, script, *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def ours(processes: int, folder: Path, *flags) -> tuple[list[float], dict]:
    """The differences of all windows, and summary.json, of one run of the script in `folder`."""
    launch(processes, ROOT / "scripts" / "gradient_accumulation.py", "--output_dir", folder, *flags)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    differences = [line["gradient_difference"] for line in lines if line["split"] == "compare"]
    return differences, json.loads((folder / "summary.json").read_text())


def main():
    import pyarrow.parquet

    work = Path(tempfile.mkdtemp())
    small = work / "data"
    small.mkdir()
    for split, rows in (("train", NUM_IMAGES), ("test", 101)):
        name = f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(f"{BUNDLED_MNIST}/{name}").slice(0, rows), small / name)
    flags = ["--dataset", small, "--batch_size", BATCH, "--num_epochs", 1, "--compare"]

    blog = {}
    for processes in CONFIGS:
        launch(processes, Path(__file__), "--naive", small, work / "naive.json")
        for variable_length, dtype, k, *result in json.loads((work / "naive.json").read_text()):
            blog[processes, variable_length, dtype, k] = result
    columns = ["P", "k", "ours float64", "last", "ours float32", "last", "all-reduces"]
    columns += ["naive float64", "last", "naive float32", "last", "all-reduces"]
    for variable_length in (False, True):
        print(f"\n{'Terms differ by sample (--variable_length)' if variable_length else 'One term a sample'}\n")
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
        for processes in CONFIGS:
            for k in STEPS:
                row, reduces = [processes, k], {}
                for who in ("ours", "naive"):
                    for dtype in ("float64", "float32"):
                        if who == "ours":
                            folder = work / f"{processes}_{k}_{dtype}_{variable_length}"
                            extra = ["--gradient_accumulation_steps", k, "--dtype", dtype]
                            extra += ["--variable_length"] * variable_length
                            differences, summary = ours(processes, folder, *flags, *extra)
                            reduces[who] = summary["gradient_all_reduces"]
                        else:
                            differences, reduces[who] = blog[processes, variable_length, dtype, k]
                        row += [f"{max(differences[:-1]):.1e}", f"{differences[-1]:.1e}"]
                    row.append(reduces[who])
                print("|", " | ".join(map(str, row)), "|", flush=True)

    print("\nNorms, P = 1, float64: largest difference\n\n| norm | k = 1 | k = 4 |\n| --- | --- | --- |")
    for norm in ("batch", "layer"):
        found = []
        for k in (1, 4):
            extra = ["--gradient_accumulation_steps", k, "--dtype", "float64", "--norm", norm]
            found.append(max(ours(1, work / f"{norm}_{k}", *flags, *extra)[0]))
        print(f"| {norm} | {found[0]:.1e} | {found[1]:.1e} |", flush=True)

    print(f"\nMemory of a process, batch {MEMORY_BATCH}, float32\n")
    print("| P | k | peak, GiB | above the start, GiB | images/s |")
    print("| --- | --- | --- | --- | --- |")
    for processes in CONFIGS:
        for k in STEPS:
            extra = ["--batch_size", MEMORY_BATCH, "--max_steps", 2, "--gradient_accumulation_steps", k]
            _, summary = ours(processes, work / f"memory_{processes}_{k}", *extra)
            shown = [summary[key] for key in ("train_peak_memory_gib", "above_start_gib", "train_images_per_s")]
            print(f"| {processes} | {k} | {shown[0]:.2f} | {shown[1]:.2f} | {shown[2]:,.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--naive", nargs=2, metavar=("DATASET", "OUT"), help=argparse.SUPPRESS)
    words = parser.parse_args()
    naive(*words.naive) if words.naive else main()
