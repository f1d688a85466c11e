"""Run the benchmarks one after another on this machine, and write results.json, RESULTS.md and the pictures.

    python benchmarks/run.py                          # all of them; RESULTS.md says how long it took
    python benchmarks/run.py mnist_epoch elastic      # these; the others keep the numbers that they have
    python benchmarks/run.py --draw                   # measure nothing: make the page and pictures from results.json

results.json holds the results of one machine with one set of versions; those of any other are dropped. `git diff
benchmarks/results.json` compares with the last commit. Each benchmark also runs alone, with its flags in --help, and
prints its tables.
"""

import argparse
import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

# In the order of RESULTS.md, with the flags with which tests run them.
BENCHMARKS = {
    "mnist_epoch": "--rounds 1",
    "same_curve": "--num_epochs 1",
    "program_of_a_post": "--num_epochs 1",
    "resnet50": "--rounds 1 --batch_size 4 --steps 4 --images 4 --photos 2",
    "data_on_disk": "--rounds 1 --images 8 --megabytes 1",
    "gradient_accumulation": "--steps 2 --memory_steps",
    "model_split": "--rounds 1 --microbatches 2 --batch_size 4",
    "pipeline_timeline": "--rounds 1 --batch_size 4",
    "zero_grad": "",
    "dp_and_ddp": "--rounds 1 --steps 2",
    "transformer_memory": "--sizes tiny --compare tiny",
    "compressors": f"--steps 2 --dataset {shlex.quote(str(common.ROOT / 'accelerate_configs'))}",
    "virtual_processes": "--rounds 1 --steps 1 --numbers 2 --resnet50_batch 4",
    "elastic": "--events 1 --steps_between 100",
}
INTRODUCTION = """\
# Results

Written by `python benchmarks/run.py` from [results.json](results.json); run it on your machine. The ways compared took
turns, because the speed of a shared machine drifts by more than they differ; a ratio is the ratio of their medians."""
HERE = Path(__file__).parent


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    return args


def module(name: str):
    return importlib.import_module(f"benchmarks.{name}")


def measure(name: str) -> dict:
    """The entry of a benchmark in results.json.

    Raises:
        CalledProcessError: if the benchmark fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, began = Path(folder) / "out.json", time.perf_counter()
        command = [sys.executable, HERE / f"{name}.py", "--json", out]
        subprocess.run(command, cwd=common.ROOT, check=True)
        facts = {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.perf_counter() - began)}
        return {**common.machine(), **facts, "measured": json.loads(out.read_text())}


def merge(old: dict, name: str, new: dict) -> dict:
    """`old` with a new entry, in the order of BENCHMARKS, without the entries of other machines and versions."""
    facts = ("device", "versions")
    kept = {other: entry for other, entry in old.items() if all(entry[fact] == new[fact] for fact in facts)}
    kept[name] = new
    return {other: kept[other] for other in BENCHMARKS if other in kept}


def section(name: str, entry: dict | None) -> str:
    """A benchmark's section in RESULTS.md."""
    title, _, body = module(name).__doc__.partition("\n\n")
    text = [f"## {title.rstrip('.')}", body.strip("\n")]
    if entry is None:
        return "\n\n".join([*text, "Not measured on this machine yet."])
    return "\n\n".join([*text, f"{entry['date']}, in {entry['seconds']} s.", *module(name).report(entry["measured"])])


def anchor(name: str) -> str:
    """The anchor of a benchmark's section in RESULTS.md."""
    return re.sub(r"[^\w -]", "", module(name).__doc__.partition(".\n")[0]).lower().replace(" ", "-")


def render(results: dict) -> str:
    """RESULTS.md. It has a heading for each benchmark, also without results, so that links keep working."""
    facts = {f"{entry['device']}; {entry['versions']}" for entry in results.values()}
    minutes = sum(entry["seconds"] for entry in results.values()) / 60
    text = [INTRODUCTION, f"All on {facts.pop()}. {minutes:.0f} minutes in all."] if facts else [INTRODUCTION]
    text += [section(name, results.get(name)) for name in BENCHMARKS]
    text.append(module("gpus").section())
    return "\n\n".join(text) + "\n"


def digest(entry: dict) -> str:
    """Identifies the results that a picture shows; stored in its metadata."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def write(results: dict) -> None:
    text = re.sub(r"\[[^][{}]+\]", lambda row: " ".join(row[0].split()), json.dumps(results, indent=1))
    (HERE / "results.json").write_text(text + "\n")
    (HERE / "RESULTS.md").write_text(render(results))
    for name, entry in results.items():
        if hasattr(module(name), "draw"):
            figure = module(name).draw(entry["measured"], entry["device"])
            figure.savefig(module(name).PICTURE, dpi=120, metadata={"Description": digest(entry)})


def main():
    args = parse_args()
    file = HERE / "results.json"
    results, failed = json.loads(file.read_text()) if file.exists() else {}, []
    for name in [] if args.draw else args.names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        try:
            entry = measure(name)
        except subprocess.CalledProcessError:
            failed.append(name)
            continue
        results = merge(results, name, entry)
        write(results)  # at once: the next one may fail
    if args.draw:
        write(results)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, and kept the numbers from before")


if __name__ == "__main__":
    main()
